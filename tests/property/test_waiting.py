"""Nobody is passed by more than the bound says, whatever comes, leaves, or is being computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core import waiting
from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.scheduler import Scheduler
from foreword.core.sequence import Sequence

ROOT = BlockHash(b"root" * 8)
WINDOW, MAX_PASSED = 3, 8  # small, so that what is drawn reaches them

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=9)
# In a step: what comes, how many of those that wait leave, whether what was computed is done.
steps = st.lists(st.tuples(st.lists(prompts, max_size=4), st.integers(0, 1)), max_size=60)


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
        scheduler.finish([one for one, num in work.work if scheduler.settle(one, num)])


@given(steps, st.integers(5, 12), st.integers(1, 3), st.integers(2, 12))
def test_nobody_is_passed_by_more_than_the_bound(
    drawn: list[tuple[list[list[int]], int]], num_blocks: int, num_seqs: int, budget: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "WINDOW", WINDOW)
        patch.setattr(waiting, "_OVERDUE", MAX_PASSED - WINDOW)
        for order in (waiting.ARRIVAL, waiting.LONGEST_PREFIX):
            run = Run(order, num_blocks, num_seqs, budget)
            for coming, num_leaving in drawn:
                run.step(coming, num_leaving)
            for _ in range(1000):
                if not (run.scheduler.waiting or run.scheduler.running):
                    break
                run.step([], 0)
            assert not run.passed, "all were served"
            assert run.most <= MAX_PASSED
