"""Waiting: the sequences that do not run yet, and in which order a step tries to admit them.

`arrival` is first come, first served. `longest-prefix`, the default, takes those first whose
prompts are known furthest. `depth-first` walks the tree of all prompts and is for batches: no order
hits more where the cache has room for the longest prompt (Zheng et al., arXiv 2312.07104, theorem
3.1).

Nobody is passed by more than MAX_PASSED that came later, but for what is admitted in steps in which
it could not be: a tier had not answered, or another lease was computing its next block. In
`depth-first` there is no such bound while others come: it is one sweep through the tree.

A step looks at WINDOW of the oldest and, for `longest-prefix`, at as many whose prompts are like
those admitted last. Their known blocks are counted once for each time that somebody left, and not
while nobody runs for want of room.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Generic, TypeAlias, TypeVar

from foreword.core.block import BlockHash
from foreword.core.cache import KVCache
from foreword.core.sequence import Sequence

ARRIVAL, LONGEST_PREFIX, DEPTH_FIRST = "arrival", "longest-prefix", "depth-first"
ORDERS = (LONGEST_PREFIX, ARRIVAL, DEPTH_FIRST)  # the default first
WINDOW = 64
MAX_PASSED = 256
_OVERDUE = MAX_PASSED - WINDOW  # passed by so many it comes first: a step admits up to a window
_NUM_RECENT = 8  # admitted last, whose neighbours in the tree are looked at

_Place: TypeAlias = tuple[bytes, bytearray, int]
_Sequence = TypeVar("_Sequence", bound=Sequence)


class Waiting(Generic[_Sequence]):
    """What was preempted and what a prompt was computed for return before all others."""

    def __init__(self, cache: KVCache, order: str = LONGEST_PREFIX) -> None:
        assert order in ORDERS
        self._cache = cache
        self._order = order
        self._returning: deque[_Sequence] = deque()
        self._queue: list[_Sequence] = []  # by arrival
        self._tree: list[_Sequence] = []  # the same by their tokens, so depth first
        self._ranked: list[_Sequence] = []  # what the last step tried; empty when somebody left
        self._recent: deque[_Place] = deque(maxlen=_NUM_RECENT)  # places in the tree
        self._swept: _Place = (b"", bytearray(), 0)  # up to here
        self._before: list[BlockHash] = []  # of the one there
        self._num_gone = 0  # admitted or cancelled, of those that came by `add`

    def __len__(self) -> int:
        return len(self._returning) + len(self._queue)

    def add(self, sequence: _Sequence) -> None:
        """One that came just now. Their `arrival` counts them, from 1."""
        self._queue.append(sequence)
        if self._order != ARRIVAL:
            insort(self._tree, sequence, key=_place)

    def put_back(self, sequences: Items[_Sequence]) -> None:
        """Some that ran, or whose prompt did."""
        self._returning.extendleft(reversed(sequences))

    def discard(self, sequence: _Sequence) -> None:
        """It is admitted, or was cancelled. Nothing changes where it does not wait."""
        at = bisect_left(self._queue, sequence.arrival, key=_arrival)
        if at == len(self._queue) or self._queue[at] is not sequence:
            if sequence in self._returning:
                self._returning.remove(sequence)
            return
        del self._queue[at]
        self._num_gone += 1
        self._ranked = []
        if self._order != ARRIVAL:
            root, key, arrival = _place(sequence)
            place = root, key.copy(), arrival  # as it is now: it grows by what is sampled
            at = bisect_left(self._tree, place, key=_place)
            # Those that were tried in vain stay before it: the sweep is not past them.
            if at == bisect_left(self._tree, self._swept, key=_place) % len(self._tree):
                self._swept, self._before = place, sequence.chain.hashes
            del self._tree[at]
            self._recent.append(place)

    def next_up(self) -> list[_Sequence]:
        """Whom to try in this step, in this order."""
        self._ranked = _free(self._ranked) or self._rank()
        return [*_free(self._returning), *self._ranked]

    def _rank(self) -> list[_Sequence]:
        if self._order == DEPTH_FIRST:
            return self._sweep()
        overdue: list[_Sequence] = []
        others: list[_Sequence] = []
        for at, sequence in enumerate(self._queue):
            if not sequence.is_held:
                num_passed = self._num_gone - (sequence.arrival - 1 - at)
                (overdue if num_passed >= _OVERDUE else others).append(sequence)
                if len(overdue) + len(others) == WINDOW:
                    break
        if self._order == LONGEST_PREFIX and len(others) > 1:
            others = self._by_prefix(others)
        return list(dict.fromkeys(overdue + others))[:WINDOW]

    def _sweep(self) -> list[_Sequence]:
        """From where the sweep is on, as far as all prompts together may stay on the device, with
        as much again for answers: what is computed too early is evicted before those that follow
        it come to their turn."""
        start = bisect_left(self._tree, self._swept, key=_place)
        found: list[_Sequence] = []
        hashes, room = self._before, self._cache.pool.num_free // 2
        for sequence in self._tree[start:] + self._tree[:start]:
            own = sequence.chain.hashes
            room -= len(own) - _num_shared(hashes, own)
            if (room < 0 or len(found) == WINDOW) and found:
                break
            if not sequence.is_held:
                found.append(sequence)
            hashes = own
        return found

    def _by_prefix(self, oldest: list[_Sequence]) -> list[_Sequence]:
        looked_at = dict.fromkeys(oldest)
        reach = WINDOW // _NUM_RECENT // 2
        for place in self._recent:
            at = bisect_left(self._tree, place, key=_place)
            looked_at |= dict.fromkeys(_free(self._tree[max(0, at - reach) : at + reach]))
        known = {
            one: 0 if one.reports_prompt else self._cache.num_known(one.chain) for one in looked_at
        }
        return sorted(known, key=lambda one: (-known[one], one.arrival))


def _free(sequences: Iterable[_Sequence]) -> list[_Sequence]:
    return [sequence for sequence in sequences if not sequence.is_held]


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _place(sequence: Sequence) -> _Place:
    """In an order of prompts in which one that goes on from another comes after it, and before all
    that do not."""
    return sequence.chain.root, sequence.chain.key, sequence.arrival


def _num_shared(left: list[BlockHash], right: list[BlockHash]) -> int:
    """Leading blocks that two prompts have in common. Hashes are chained: agreement is a prefix."""
    size = min(len(left), len(right))
    return bisect_left(range(size), True, key=lambda at: left[at] != right[at])
