"""ARC: room for what was used once and for what was used again, as much of each as pays, leaf first
(Megiddo and Modha, FAST 2003).

When a ghost of one kind comes again, that kind has too little room. Ghosts are as many blocks as
the cache has, whatever their kind.
"""

from collections.abc import Hashable
from typing import TypeVar

from foreword.core.policies.runs import Ghost, Run, RunOrder
from foreword.core.policy import Policy

_Key = TypeVar("_Key", bound=Hashable)

_ONCE, _AGAIN = 0, 1


class ARC(RunOrder[_Key]):
    def __init__(self, capacity: int, _block_tokens: int) -> None:
        super().__init__(2, capacity)
        self._capacity = capacity
        self._room = 0.0  # blocks that were used once may have so many

    def begin(self, known: list[Run], recalled: Run, num_fresh: int) -> int:
        return _ONCE

    def reuse(self, run: Run) -> None:
        self.sort(run, _AGAIN)

    def recall(self, ghost: Ghost, num_blocks: int) -> None:
        own, other = self.num_ghosts[ghost.kind], self.num_ghosts[1 - ghost.kind]
        step = num_blocks * max(1.0, other / own)
        room = self._room + (step if ghost.kind == _ONCE else -step)
        self._room = min(max(room, 0.0), self._capacity)

    def choose(self) -> _Key | None:
        once, again = (queue.first() for queue in self.queues)
        if once is not None and (again is None or self.num_blocks[_ONCE] > self._room):
            return once[2]
        return again[2] if again is not None else None


ADAPTIVE = Policy("arc", ARC)
