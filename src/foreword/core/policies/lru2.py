"""LRU-2: by the use before the last (O'Neil, O'Neil and Weikum, SIGMOD 1993), leaf first.

What was used once leaves first. Ghosts remember uses of what comes again.
"""

from collections.abc import Hashable
from typing import TypeVar

from foreword.core.policies.runs import Run, RunOrder
from foreword.core.policy import Policy

_Key = TypeVar("_Key", bound=Hashable)

_ONCE, _AGAIN = 0, 1
_GHOSTS = 4  # times the capacity, in blocks


class LRU2(RunOrder[_Key]):
    def __init__(self, capacity: int, _block_tokens: int) -> None:
        super().__init__(2, _GHOSTS * capacity)

    def begin(self, known: list[Run], recalled: Run, num_fresh: int) -> int:
        return _ONCE

    def reuse(self, run: Run) -> None:
        self.sort(run, _AGAIN)

    def rank(self, run: Run) -> float:
        return run.earlier_s if run.kind == _AGAIN else run.used_s

    def choose(self) -> _Key | None:
        first = self.queues[_ONCE].first() or self.queues[_AGAIN].first()
        return first[2] if first is not None else None


LRU_2 = Policy("lru-2", LRU2)
