"""Policy: which leaf of a tree of blocks leaves first.

Leaf first holds whatever a policy says: only what may leave is offered to it. Each place has an
Order of its own, which it tells what happens to its blocks.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from foreword.core.block import BlockHash

_MOVED = 4  # entries that a queue moves at an offer

_Key = TypeVar("_Key", bound=Hashable)

# One key's hashes: of the full blocks that it stands for, in a row.
Span = tuple[_Key, Sequence[BlockHash]]


class Order(Generic[_Key]):
    """Of one place. A key stands for one block, or several in a row; for one that is not full it
    has no hash."""

    by_path = False  # whether it wants to hear of uses
    by_run = True  # whether all blocks of a key rank alike, so that they may leave at once

    def __init__(self) -> None:
        self.now_s = 0.0  # of any clock that does not run backwards; its owner sets it
        self.candidates: dict[_Key, int] = {}  # the number of each one's newest offer
        self.num_offers = 0

    def offer(self, key: _Key, added: int, last_used: int, hashes: Sequence[BlockHash]) -> None:
        """The blocks of `key` are a candidate, at the rank that they have now. When they came and
        were last used is by the owner's count of uses."""
        raise NotImplementedError

    def pop(self) -> _Key | None:
        """The one that leaves first. No candidate again until offered. None: there is none."""
        raise NotImplementedError

    def withdraw(self, key: _Key) -> None:
        """It is no candidate any more, if it was."""
        self.candidates.pop(key, None)

    def used(self, path: Sequence[Span[_Key]], split: Callable[[_Key, int], _Key]) -> None:
        """A request used these, all that is kept from a root on. `split` gives the first blocks of
        a key a key of their own."""

    def used_blocks(self, path: Sequence[_Key]) -> None:
        """The same, where each key stands for one block, and is its hash."""

    def split(self, head: _Key, tail: _Key) -> None:
        """The first blocks of `tail` are `head` now."""

    def removed(self, key: _Key, hashes: Sequence[BlockHash], *, whole: bool) -> None:
        """The last blocks of `key` left, or the `whole` of it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`make` gives the order of a place for so many blocks, of so many tokens."""

    name: str
    make: Callable[[int, int], Order[Any]]
    block_tokens: int = 16

    def order(self, capacity: int) -> Order[Any]:
        return self.make(capacity, self.block_tokens)


class Queue(Generic[_Key]):
    """Candidates by rank; among equals the one that was offered first. Queues that share `offers`
    share candidates: each is where it was offered last.

    Older offers stay until they are passed over. When they are most of a queue, what holds goes to
    a new heap, a few with each offer: no call takes long.
    """

    def __init__(self, offers: dict[_Key, int]) -> None:
        self._offers = offers  # the number of each one's newest offer
        self._heap: list[tuple[float, int, _Key]] = []
        self._leaving: list[tuple[float, int, _Key]] = []  # a heap, too: its end is taken off

    def __len__(self) -> int:
        """With older offers."""
        return len(self._heap) + len(self._leaving)

    def offer(self, key: _Key, rank: float, serial: int) -> None:
        self._offers[key] = serial
        if not self._leaving and len(self._heap) > 2 * len(self._offers):
            self._heap, self._leaving = [], self._heap
        heappush(self._heap, (rank, serial, key))
        for _ in range(min(_MOVED, len(self._leaving))):
            entry = self._leaving.pop()
            if self._offers.get(entry[2]) == entry[1]:
                heappush(self._heap, entry)

    def first(self) -> tuple[float, int, _Key] | None:
        """Rank, serial and key of the one that leaves first."""
        best, offers = None, self._offers
        for heap in (self._heap, self._leaving):
            while heap and offers.get(heap[0][2]) != heap[0][1]:
                heappop(heap)
            if heap and (best is None or heap[0] < best):
                best = heap[0]
        return best


# Of a leaf: when it came, when it was last used, and the hash of its last block (None: that one is
# not full). What has the least rank leaves first.
Rank = Callable[[int, int, BlockHash | None], float]


class Ranked(Order[_Key]):
    """By a rank that a leaf keeps until it is offered anew. Where it goes by the hash, the order is
    not `by_run`."""

    def __init__(self, rank: Rank, *, by_run: bool = True) -> None:
        super().__init__()
        self.by_run = by_run
        self._rank = rank
        self._queue = Queue(self.candidates)

    def offer(self, key: _Key, added: int, last_used: int, hashes: Sequence[BlockHash]) -> None:
        self.num_offers += 1
        rank = self._rank(added, last_used, hashes[-1] if hashes else None)
        self._queue.offer(key, rank, self.num_offers)

    def pop(self) -> _Key | None:
        first = self._queue.first()
        if first is None:
            return None
        self.withdraw(first[2])
        return first[2]


LRU = Policy("lru", lambda _capacity, _tokens: Ranked(lambda _added, last_used, _hash: last_used))
FIFO = Policy("fifo", lambda _capacity, _tokens: Ranked(lambda added, _last_used, _hash: added))
