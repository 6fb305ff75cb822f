"""S3-FIFO: a small queue to prove oneself in, and a main one where what is used goes round again,
leaf first (Yang et al., SOSP 2023).
"""

from collections.abc import Hashable
from typing import TypeVar

from foreword.core.policies.runs import Run, RunOrder
from foreword.core.policy import Policy

_Key = TypeVar("_Key", bound=Hashable)

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1  # of the capacity
_MOST_USES = 4  # that count: the one that it came with, and three


class S3FIFO(RunOrder[_Key]):
    """A run goes from one queue to the other as a whole. Its `num_uses` are those since it came to
    its queue or went round."""

    def __init__(self, capacity: int, _block_tokens: int) -> None:
        super().__init__(2, capacity)
        self._small_room = _SMALL_SHARE * capacity

    def begin(self, known: list[Run], recalled: Run, num_fresh: int) -> int:
        recalled.kind, recalled.num_uses = _MAIN, 0
        return _SMALL

    def reuse(self, run: Run) -> None:
        run.num_uses = min(run.num_uses, _MOST_USES)

    def rank(self, run: Run) -> float:
        return run.came

    def choose(self) -> _Key | None:
        while True:
            small, main = (queue.first() for queue in self.queues)
            if small is not None and (main is None or self.num_blocks[_SMALL] > self._small_room):
                key, enough = small[2], 3
            elif main is not None:
                key, enough = main[2], 2
            else:
                return None
            run = self._runs.get(key)
            if run is None or run.num_uses < enough:
                return key
            run.num_uses = 1 if run.kind == _SMALL else run.num_uses - 1
            run.came = self.num_offers
            self.sort(run, _MAIN)
            self.offer_run(key, run)


S3_FIFO = Policy("s3-fifo", S3FIFO)
