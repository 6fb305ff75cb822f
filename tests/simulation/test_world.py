"""No seed of the worlds gives a wrong answer, leaks a block or stops."""

import pytest

from foreword.core.block import Chain
from foreword.core.cache import KVCache
from foreword.core.request import Request, SamplingParams
from foreword.core.scheduler import Scheduler
from foreword.engine.sample import Sample
from laws import Slots
from world import ROOTS, World


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
    samples = [Sample(request, i, Chain(ROOTS[0], 4, range(22)), 0, None) for i in range(4)]
    scheduler.add(samples)
    computed = []
    for _ in range(2):
        step = scheduler.schedule()
        for sequence, copy in step.copies:
            slots.copy(copy)
            cache.filled(sequence.lease, copy.num_tokens)
        for sequence, start, num_tokens in step.work:
            slots.compute(sequence.lease, start, num_tokens)
            scheduler.settle(sequence, num_tokens)
            sequence.chain.extend((40 + sequence.index,))
            scheduler.start_siblings(sequence)
        computed.append([num_tokens for *_, num_tokens in step.work])
    assert computed == [[22], [1, 1, 1, 1]]
    assert len({s.lease.block_ids[4] for s in samples}) == 1
    assert len({s.lease.block_ids[5] for s in samples}) == 4
