"""Nobody is passed by more than the bound says, whatever comes, leaves, or is being computed."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core import waiting
from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.scheduler import Scheduler
from foreword.core.sequence import Sequence

ROOT = BlockHash(b"root" * 8)
WINDOW, MAX_PASSED = 3, 8  # small, so that what is drawn reaches them

NUM_STEPS = 50


class Run:
    """A scheduler, and of each that waits how many passed it while it could be admitted."""

    def __init__(self, order: str, num_blocks: int, num_seqs: int, budget: int) -> None:
        cache = KVCache(num_blocks, 2)
        self.scheduler: Scheduler[Sequence] = Scheduler(cache, num_seqs, budget, budget, order)
        self.passed: dict[Sequence, int] = {}
        self.most = 0

    def step(self, coming: list[list[int]], num_leaving: int) -> None:
        scheduler = self.scheduler
        for prompt in coming:
            sequence = Sequence(Chain(ROOT, 2, prompt))
            scheduler.add([sequence])
            self.passed[sequence] = 0
        for sequence in list(self.passed)[-num_leaving - 1 : -1]:
            scheduler.finish([sequence])
            del self.passed[sequence]
        work = scheduler.schedule()
        admitted = [one for one in scheduler.running if one in self.passed]
        for sequence in admitted:
            del self.passed[sequence]
            for other in self.passed:
                if other.arrival < sequence.arrival and not other.is_held:
                    self.passed[other] += 1
                    self.most = max(self.most, self.passed[other])
        for sequence, copy in work.copies:
            assert sequence.lease is not None
            scheduler.cache.filled(sequence.lease, copy.num_tokens)
        scheduler.finish([one for one, _start, num in work.work if scheduler.settle(one, num)])


def busy(draw: Random, order: str) -> Run:
    """More come than run. Most begin alike, so that those that do not are passed."""
    run = Run(order, draw.randint(8, 30), draw.randint(1, 6), draw.randint(4, 40))
    opening = [draw.randrange(3) for _ in range(draw.randint(0, 8))]
    for _ in range(NUM_STEPS):
        coming = []
        for _ in range(draw.choice([0, 1, 1, 2, 6])):
            known = opening if draw.random() < 0.8 else []
            coming.append([*known, *(draw.randrange(3) for _ in range(draw.randint(1, 6)))])
        run.step(coming, draw.choice([0, 0, 0, 1]))
    for _ in range(2000):
        if not (run.scheduler.waiting or run.scheduler.running):
            break
        run.step([], 0)
    assert not run.passed, "all were served"
    return run


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_nobody_is_passed_by_more_than_the_bound(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "WINDOW", WINDOW)
        patch.setattr(waiting, "_NUM_RECENT", 1)  # each with a neighbour on both sides
        patch.setattr(waiting, "_OVERDUE", MAX_PASSED - WINDOW)
        for order in (waiting.ARRIVAL, waiting.LONGEST_PREFIX):
            assert busy(Random(seed), order).most <= MAX_PASSED


def test_without_the_bound_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WINDOW", WINDOW)
    monkeypatch.setattr(waiting, "_OVERDUE", 1 << 30)
    most = [busy(Random(seed), waiting.LONGEST_PREFIX).most for seed in range(30)]
    assert sum(one > 2 * MAX_PASSED for one in most) > 5
