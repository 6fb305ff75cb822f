"""Seeded worlds: requests come, branch, sample, are cancelled and preempted, in small pools.

The production scheduler and core run; only the model is replaced, by one whose next token is a
function of all tokens before it, read back from the memory that the cache handed out. So wrong KV
gives a wrong answer, and the truth needs no cache. The seed draws the world too.
"""

from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

import pytest

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.request import Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import Sequence
from laws import Listener, Slots, check_index, check_leases, check_pool

ROOTS = [BlockHash(bytes([i]) * 32) for i in range(2)]


def next_token(prefix, alphabet, index):
    """What the stand-in model says after `prefix` (chain root first) in sample `index`."""
    return sha256(repr((prefix, index % 2)).encode()).digest()[0] % alphabet


@dataclass
class Report:
    answers: dict = field(default_factory=dict)
    reused: int = 0
    prefilled: int = 0
    preempted: int = 0
    cancelled: int = 0
    steps: int = 0


class World:
    def __init__(self, seed, reuse=True):
        self.random = Random(seed)
        self.block_size = self.random.choice([1, 2, 4, 8])
        self.alphabet = self.random.choice([2, 3, 50])
        longest = -(-60 // self.block_size)
        num_blocks = longest + self.random.randint(0, 2 * longest)
        self.slots = Slots(num_blocks, self.block_size)
        self.cache = KVCache(num_blocks, self.block_size, reuse=reuse, record_events=True)
        self.scheduler = Scheduler(
            self.cache, self.random.randint(1, 6), self.random.randint(8, 20), 40
        )
        self.listener = Listener()
        self.report = Report()
        self.live = []
        self.known = [[]]

    def submit(self, number):
        base = self.random.choice(self.known)
        prompt = base[: self.random.randint(0, len(base))]
        prompt = prompt + [
            self.random.randrange(self.alphabet) for _ in range(self.random.randint(1, 12))
        ]
        prompt = prompt[:40]
        self.known.append(prompt)
        num_new = self.random.randint(1, 20)
        request = Request(str(number), tuple(prompt), SamplingParams(num_new), n=1)
        root = self.random.choice(ROOTS)
        samples = [
            Sequence(request, index, Chain(root, self.block_size, prompt), 0, None)
            for index in range(self.random.choice([1, 1, 1, 2, 3]))
        ]
        self.live += samples
        self.scheduler.add(samples)

    def step(self):
        step = self.scheduler.schedule()
        assert (
            step.work
            or not (self.scheduler.running or self.scheduler.waiting)
            or (self.scheduler.num_preemptions > self.report.preempted)
        ), "work waits but nothing is done"
        self.report.preempted = self.scheduler.num_preemptions
        leases = [s.lease for s in self.scheduler.running]
        check_pool(self.cache, leases)
        check_leases(leases, self.block_size)
        assert {id(s) for s, _ in step.work} <= {id(s) for s in self.scheduler.running}
        for sequence, copy in step.copies:
            self.slots.copy(copy)
            self.cache.filled(sequence.lease, copy.num_tokens)
        done = []
        for sequence, num_tokens in step.work:
            assert num_tokens > 0
            self.slots.compute(sequence.lease, num_tokens)
            self.report.prefilled += num_tokens if not sequence.is_decoding else 0
        for sequence, num_tokens in step.work:
            if self.scheduler.settle(sequence, num_tokens):
                lease = sequence.lease
                block, offset = divmod(lease.num_computed_tokens - 1, self.block_size)
                prefix = self.slots.held[lease.block_ids[block]][offset]
                sequence.chain.extend((next_token(prefix, self.alphabet, sequence.index),))
                self.scheduler.start_siblings(sequence)
                if sequence.num_sampled == sequence.request.sampling.max_tokens:
                    done.append(sequence)
        for sequence in done:
            key = (sequence.request.request_id, sequence.index)
            self.report.answers[key] = (
                sequence.chain.root,
                sequence.request.prompt,
                tuple(sequence.chain.token_ids[len(sequence.request.prompt) :]),
            )
            self.report.reused += sequence.num_cached_tokens
            self.live.remove(sequence)
            self.known.append(list(sequence.chain.token_ids))
        self.scheduler.finish(done)
        self.report.steps += 1

    def cancel(self):
        request = self.random.choice(self.live).request
        gone = [s for s in self.live if s.request is request]
        self.scheduler.finish(gone)
        self.live = [s for s in self.live if s not in gone]
        self.report.cancelled += 1

    def run(self, num_requests):
        number = 0
        while number < num_requests or self.live:
            while number < num_requests and self.random.random() < 0.4:
                self.submit(number)
                number += 1
            if self.live and self.random.random() < 0.03:
                self.cancel()
            self.step()
            check_pool(self.cache, [s.lease for s in self.scheduler.running])
            check_index(self.cache)
            self.listener.hear(self.cache.take_events())
            self.listener.check(self.cache)
            assert self.report.steps < 100 * num_requests, "no progress"
        assert self.cache.pool.num_leased == 0
        return self.report

    def truth(self, root, prompt, num_new, index):
        prefix = (root, *prompt)
        for _ in range(num_new):
            prefix = (*prefix, next_token(prefix, self.alphabet, index))
        return prefix[-num_new:]


@pytest.mark.parametrize("seed", range(40))
def test_no_seed_gives_a_wrong_answer(seed):
    world = World(seed)
    report = world.run(60)
    assert report.answers
    for (_, index), (root, prompt, answer) in report.answers.items():
        assert answer == world.truth(root, prompt, len(answer), index)


def test_the_worlds_are_worth_running():
    reports = [World(seed).run(60) for seed in range(12)]
    assert sum(report.reused for report in reports) > 1000
    assert sum(report.preempted for report in reports) > 10
    assert sum(report.cancelled for report in reports) > 10


def test_same_seed_same_world():
    assert World(7).run(80) == World(7).run(80)


def test_without_reuse_every_prompt_is_prefilled():
    world = World(3, reuse=False)
    report = world.run(40)
    assert report.reused == 0
    for (_, index), (root, prompt, answer) in report.answers.items():
        assert answer == world.truth(root, prompt, len(answer), index)


def test_samples_share_the_prompt():
    """Four samples of a prompt of 22 tokens compute 22 + 3 x 1 tokens and hold it once."""
    cache = KVCache(64, 4)
    scheduler = Scheduler(cache, 8, 100, 100)
    slots = Slots(64, 4)
    request = Request("r", tuple(range(22)), SamplingParams(3), n=4)
    samples = [Sequence(request, i, Chain(ROOTS[0], 4, range(22)), 0, None) for i in range(4)]
    scheduler.add(samples)
    computed = []
    for _ in range(2):
        step = scheduler.schedule()
        for sequence, copy in step.copies:
            slots.copy(copy)
            cache.filled(sequence.lease, copy.num_tokens)
        for sequence, num_tokens in step.work:
            slots.compute(sequence.lease, num_tokens)
            scheduler.settle(sequence, num_tokens)
            sequence.chain.extend((40 + sequence.index,))
            scheduler.start_siblings(sequence)
        computed.append([num_tokens for _, num_tokens in step.work])
    assert computed == [[22], [1, 1, 1, 1]]
    assert len({s.lease.block_ids[4] for s in samples}) == 1
    assert len({s.lease.block_ids[5] for s in samples}) == 4
