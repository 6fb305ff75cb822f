"""Seeded worlds: requests come, branch, sample, are cancelled and preempted, in small pools.

The production scheduler and core run; only the model is replaced, by one whose next token is a
function of all tokens before it, read back from the memory that the cache handed out. So wrong KV
gives a wrong answer, and the truth needs no cache. The seed draws the world too.
"""

from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.place import Gain
from foreword.core.policies import POLICIES
from foreword.core.request import NO_HINTS, Request, SamplingParams
from foreword.core.scheduler import Scheduler
from foreword.engine.sample import Sample
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
    spare = 2.0  # room beyond the longest request, at most, as a share of that
    cancelled = 0.03  # how likely a request is cancelled, in each step
    recent = 0  # prompts branch off one of so many last ones; 0: of all

    def __init__(self, seed, reuse=True):
        self.random = Random(seed)
        self.block_size = self.random.choice([1, 2, 4, 8])
        self.alphabet = self.random.choice([2, 3, 50])
        longest = -(-60 // self.block_size)
        num_blocks = longest + self.random.randint(0, int(self.spare * longest))
        self.slots = Slots(num_blocks, self.block_size)
        self.policy = self.random.choice(list(POLICIES.values()))
        self.cache = KVCache(
            num_blocks,
            self.block_size,
            reuse=reuse,
            record_events=True,
            tiers=self.tiers(),
            policy=self.policy,
            placement=self.placement(),
        )
        self.scheduler = Scheduler(
            self.cache, self.random.randint(1, 6), self.random.randint(8, 20), 40
        )
        self.listener = Listener()
        self.report = Report()
        self.live = []
        self.known = [[]]
        self.loads = []  # [load, start, stop] that were not reported yet

    def tiers(self):
        return ()

    def placement(self):
        return Gain

    def hints(self):
        return NO_HINTS

    def perform(self, effects):
        assert not effects

    def submit(self, number):
        self.cache.tick(float(number))
        base = self.random.choice(self.known[-self.recent :])
        prompt = base[: self.random.randint(0, len(base))]
        prompt = prompt + [
            self.random.randrange(self.alphabet) for _ in range(self.random.randint(1, 12))
        ]
        prompt = prompt[:40]
        self.known.append(prompt)
        num_new = self.random.randint(1, 20)
        request = Request(str(number), tuple(prompt), SamplingParams(num_new), hints=self.hints())
        root = self.random.choice(ROOTS)
        samples = [
            Sample(request, index, Chain(root, self.block_size, prompt), 0, None)
            for index in range(self.random.choice([1, 1, 1, 2, 3]))
        ]
        self.live += samples
        self.perform(self.scheduler.add(samples))

    @property
    def awaits_tiers(self):
        return False

    def step(self):
        step = self.scheduler.schedule()
        self.perform(self.cache.lower.take_effects())
        self.perform(step.loads)
        assert (
            step.work
            or self.awaits_tiers
            or not (self.scheduler.running or self.scheduler.waiting)
            or (self.scheduler.num_preemptions > self.report.preempted)
        ), "work waits but nothing is done"
        self.report.preempted = self.scheduler.num_preemptions
        leases = [s.lease for s in self.scheduler.running]
        check_pool(self.cache, leases)
        check_leases(leases, self.block_size, self.loads)
        assert {id(s) for s, *_ in step.work} <= {id(s) for s in self.scheduler.running}
        for sequence, copy in step.copies:
            self.slots.copy(copy)
            self.cache.filled(sequence.lease, copy.num_tokens)
        done = []
        for sequence, start, num_tokens in step.work:
            assert num_tokens > 0
            self.slots.compute(sequence.lease, start, num_tokens)
            self.report.prefilled += num_tokens if not sequence.is_decoding else 0
        ready = [s for s, _start, num_tokens in step.work if self.scheduler.settle(s, num_tokens)]
        self.perform(self.cache.lower.take_effects())
        for sequence in ready:
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
            if self.live and self.random.random() < self.cancelled:
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
