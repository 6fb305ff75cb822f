"""Policy: which leaf of a tree of blocks leaves first.

Leaf first holds whatever a policy says: only what may leave is offered to it. Each place has an
Order of its own, which it tells what happens to its blocks.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Protocol, TypeVar

from foreword.core.block import BlockHash

_Key = TypeVar("_Key", bound=Hashable)

# One key's hashes: of the full blocks that it stands for, in a row.
Span = tuple[_Key, Sequence[BlockHash]]


class Order(Protocol[_Key]):
    """Of one place. A key stands for one block, or several in a row; for one that is not full it
    has no hash."""

    now_s: float  # of any clock that does not run backwards; its owner sets it
    by_path: bool  # whether it wants to hear `used`
    by_run: bool  # whether all blocks of a key rank alike, so that they may leave at once

    def offer(self, key: _Key, added: int, last_used: int, hashes: Sequence[BlockHash]) -> None:
        """The blocks of `key` are a candidate, at the rank that they have now. When they came and
        were last used is by the owner's count of uses."""
        ...

    def withdraw(self, key: _Key) -> None:
        """It is no candidate any more, if it was."""
        ...

    def pop(self) -> _Key | None:
        """The one that leaves first. No candidate again until offered. None: there is none."""
        ...

    def used(
        self, path: Sequence[Span[_Key]], split: Callable[[_Key, int], _Key] | None = None
    ) -> None:
        """A request used these, all that is kept from a root on. `split` gives the first blocks of
        a key a key of their own; None where each stands for one."""
        ...

    def split(self, head: _Key, tail: _Key) -> None:
        """The first blocks of `tail` are `head` now."""
        ...

    def removed(self, key: _Key, hashes: Sequence[BlockHash], *, whole: bool) -> None:
        """The last blocks of `key` left, or the `whole` of it."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """`make` gives the order of a place with room for so many blocks of so many tokens."""

    name: str
    make: Callable[[int, int], Order[Any]]
    block_tokens: int = 16

    def order(self, capacity: int) -> Order[Any]:
        return self.make(capacity, self.block_tokens)


# Of a leaf: when it came, when it was last used, and the hash of its last block (None: that one is
# not full). What has the least rank leaves first.
Rank = Callable[[int, int, BlockHash | None], float]


class Ranked(Order[_Key]):
    """By rank; among equals the one that was offered first. Where the rank goes by the hash, it is
    not `by_run`."""

    by_path = False

    def __init__(self, rank: Rank, *, by_run: bool = True) -> None:
        self.now_s = 0.0
        self._rank = rank
        self.by_run = by_run
        self._offers: dict[_Key, int] = {}  # the number of each one's newest offer
        self._heap: list[tuple[float, int, _Key]] = []  # older offers too
        self._serial = 0

    def offer(self, key: _Key, added: int, last_used: int, hashes: Sequence[BlockHash]) -> None:
        self._serial += 1
        self._offers[key] = self._serial
        if len(self._heap) > 2 * len(self._offers):
            self._heap = [entry for entry in self._heap if self._offers.get(entry[2]) == entry[1]]
            heapify(self._heap)
        rank = self._rank(added, last_used, hashes[-1] if hashes else None)
        heappush(self._heap, (rank, self._serial, key))

    def withdraw(self, key: _Key) -> None:
        self._offers.pop(key, None)

    def pop(self) -> _Key | None:
        while self._heap:
            _rank, serial, key = heappop(self._heap)
            if self._offers.get(key) == serial:
                del self._offers[key]
                return key
        return None

    def used(
        self, path: Sequence[Span[_Key]], split: Callable[[_Key, int], _Key] | None = None
    ) -> None:
        pass

    def split(self, head: _Key, tail: _Key) -> None:
        pass

    def removed(self, key: _Key, hashes: Sequence[BlockHash], *, whole: bool) -> None:
        pass


LRU = Policy("lru", lambda _capacity, _tokens: Ranked(lambda _added, last_used, _hash: last_used))
FIFO = Policy("fifo", lambda _capacity, _tokens: Ranked(lambda added, _last_used, _hash: added))
