"""Policy: which leaf of a tree of blocks leaves first; and the candidates, in that order.

Leaf first holds whatever a policy says: it ranks only what may leave.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from foreword.core.block import BlockHash

# Of a leaf: when it came, when it was last used, both by the owner's own clock, and the hash of its
# last block (None: that one is not full). What has the least rank leaves first.
Rank = Callable[[int, int, BlockHash | None], float]

_Leaf = TypeVar("_Leaf", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Policy:
    """`by_run`: blocks that came and were used together rank alike, so they may leave at once."""

    name: str
    rank: Rank
    by_run: bool = True


def _last_used(_added: int, last_used: int, _block_hash: BlockHash | None) -> float:
    return last_used


def _added(added: int, _last_used: int, _block_hash: BlockHash | None) -> float:
    return added


LRU = Policy("lru", _last_used)
FIFO = Policy("fifo", _added)
POLICIES = {policy.name: policy for policy in (LRU, FIFO)}


class Leaves(Generic[_Leaf]):
    """The leaves that may leave, by rank; among equals the one that was offered first."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._offers: dict[_Leaf, int] = {}  # the number of each one's newest offer
        self._heap: list[tuple[float, int, _Leaf]] = []  # older offers too
        self._serial = 0

    def offer(self, leaf: _Leaf, added: int, last_used: int, block_hash: BlockHash | None) -> None:
        """`leaf` is a candidate, with the rank that it has now."""
        self._serial += 1
        self._offers[leaf] = self._serial
        if len(self._heap) > 2 * len(self._offers):
            self._heap = [entry for entry in self._heap if self._offers.get(entry[2]) == entry[1]]
            heapify(self._heap)
        heappush(self._heap, (self.policy.rank(added, last_used, block_hash), self._serial, leaf))

    def withdraw(self, leaf: _Leaf) -> None:
        """It is none any more, if it was."""
        self._offers.pop(leaf, None)

    def pop(self) -> _Leaf | None:
        """The one that leaves first. No candidate again until offered. None: there is none."""
        while self._heap:
            _rank, serial, leaf = heappop(self._heap)
            if self._offers.get(leaf) == serial:
                del self._offers[leaf]
                return leaf
        return None
