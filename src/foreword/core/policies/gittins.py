"""Gittins: evict what is least worth its room, by how soon such blocks were needed again before.

Blocks that came and were last used together are a Run, and a run has a kind: how large the prompt
was that it came with, how much a session appended with it, how often it was used, whether its
session went on elsewhere. For each kind it is learned after how many seconds such blocks are used
again, from those that were and, censored, from those that still wait, here or as ghosts of what was
evicted. The Gittins index of a kind at an age is the best ratio of the chance of a use to the
block-seconds spent on waiting for it, over all ages to stop at (Gittins 1979; for caches with
Kaplan-Meier hazards). The least index leaves first; before anything is known that is the oldest.

Times are those of the owner's clock, in seconds. Work per call is bounded: a table is learned anew
piece by piece, over many requests.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import log
from typing import TypeVar

from foreword.core.block import BlockHash
from foreword.core.policy import Order, Policy, Span

_Key = TypeVar("_Key", bound=Hashable)

# Ages: bin a starts at _EDGES[a] seconds. 28 bins reach a day.
_FIRST_S, _GROWTH, _NUM_BINS = 0.5, 1.5, 28
_EDGES = [_FIRST_S * (_GROWTH**a - 1) / (_GROWTH - 1) for a in range(_NUM_BINS + 1)]
_WIDTHS = [_EDGES[a + 1] - _EDGES[a] for a in range(_NUM_BINS)]
_HORIZON_S = 4 * 3600.0

# Kinds: of a prompt that continues nothing, by its tokens; of what a session appends, by its
# tokens; of what was used again, by how often; of what its session went on without.
_FRESH_TOKENS = (2048, 8192, 32768)
_APPENDED_TOKENS = (512, 1024, 2048, 4096, 8192)
_NUM_USES = (2, 3, 5, 9, 16)
_APPENDED = len(_FRESH_TOKENS) + 1
_REUSED = _APPENDED + len(_APPENDED_TOKENS) + 1
_SUPERSEDED = _REUSED + len(_NUM_USES) + 1
_NUM_KINDS = _SUPERSEDED + 1

_PRIOR = 20.0  # blocks: the weight of all kinds' hazard in each kind's
_SUPERSEDED_PRIOR = 0.2  # of that hazard, where a session went on elsewhere
_DECAY = 0.99  # of counts, each time that a table is learned
_GHOSTS = 4  # times the capacity, in blocks
_AT_ONCE = 500  # runs looked at per call while learning


def _bin(age_s: float) -> int:
    if age_s <= 0:
        return 0
    return min(_NUM_BINS - 1, int(log(1 + age_s * (_GROWTH - 1) / _FIRST_S) / log(_GROWTH)))


def _step(bounds: Sequence[int], value: int) -> int:
    """How many of the bounds the value is above."""
    return sum(value > bound for bound in bounds)


class Run:
    """Blocks in a row that came and were last used together."""

    __slots__ = (
        "follower",
        "ghost",
        "kind",
        "leaf",
        "num_blocks",
        "num_branches",
        "num_uses",
        "request",
        "used_s",
    )

    def __init__(self, kind: int, num_uses: int, used_s: float, request: int) -> None:
        self.kind = kind
        self.num_uses = num_uses
        self.used_s = used_s
        self.request = request  # that used it last
        self.num_blocks = 0
        self.num_branches = 1  # continuations that its end ever had; 2 stands for more
        self.follower: Run | None = None  # what that request used after it
        self.ghost: _Ghost | None = None  # of its evicted end
        self.leaf: Hashable | None = None  # of it, as last offered


class _Ghost:
    """Evicted blocks in a row; `hashes` from the last to the first."""

    __slots__ = ("hashes", "kind", "num_branches", "num_uses", "used_s")

    def __init__(self, run: Run, hashes: list[BlockHash]) -> None:
        self.hashes = hashes
        self.kind = run.kind
        self.num_uses = run.num_uses
        self.used_s = run.used_s
        self.num_branches = run.num_branches


@dataclass(frozen=True, slots=True)
class _Recalled:
    """Evicted blocks that came again; `num_branches` is of the last one's end."""

    num_blocks: int
    num_uses: int
    num_branches: int


class Gittins(Order[_Key]):
    """The order of one place with room for `capacity` blocks of `block_tokens` tokens. A key stands
    for one block, or several in a row."""

    by_path = True
    by_run = True

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.now_s = 0.0
        self._max_ghosts = _GHOSTS * capacity
        self._block_tokens = block_tokens
        self._learn_every = max(2000, capacity // 4)  # blocks used
        self._num_since = 0
        self._learning: Iterator[None] | None = None
        self._runs: dict[_Key, Run] = {}
        self._ghosts: dict[BlockHash, _Ghost] = {}  # by the first hash; the oldest first
        self._num_ghosts = 0  # blocks
        self._heaps: list[list[tuple[float, int, _Key]]] = [[] for _ in range(_NUM_KINDS)]
        self._offers: dict[_Key, int] = {}
        self._serial = 0
        self._request = 0
        self._reused = [[0.0] * _NUM_BINS for _ in range(_NUM_KINDS)]  # blocks, by kind and age
        self._left = [[0.0] * _NUM_BINS for _ in range(_NUM_KINDS)]  # that nobody waits for now
        self._index = [[1 / (1 + edge) for edge in _EDGES[:-1]] for _ in range(_NUM_KINDS)]

    def offer(self, key: _Key, added: int, last_used: int, hashes: Sequence[BlockHash]) -> None:
        self._offer(key)

    def _offer(self, key: _Key) -> None:
        run = self._runs.get(key)
        if run is None:  # no request that used it has ended
            run = Run(0, 1, self.now_s, -1)
        run.leaf = key
        self._serial += 1
        self._offers[key] = self._serial
        heap = self._heaps[run.kind]
        if len(heap) > 2 * len(self._offers) + 8:
            heap[:] = [entry for entry in heap if self._offers.get(entry[2]) == entry[1]]
            heapify(heap)
        heappush(heap, (run.used_s, self._serial, key))

    def withdraw(self, key: _Key) -> None:
        self._offers.pop(key, None)

    def pop(self) -> _Key | None:
        best: tuple[float, float, int] | None = None
        kind = 0
        for at, heap in enumerate(self._heaps):
            while heap and self._offers.get(heap[0][2]) != heap[0][1]:
                heappop(heap)
            if heap:
                used_s, serial, _key = heap[0]
                worth = self._index[at][_bin(self.now_s - used_s)], used_s, serial
                if best is None or worth < best:
                    best, kind = worth, at
        if best is None:
            return None
        key = heappop(self._heaps[kind])[2]
        del self._offers[key]
        return key

    def split(self, head: _Key, tail: _Key) -> None:
        if tail in self._runs:
            self._runs[head] = self._runs[tail]

    def removed(self, key: _Key, hashes: Sequence[BlockHash], *, whole: bool) -> None:
        run = self._runs.pop(key, None) if whole else self._runs.get(key)
        if run is None or not hashes:
            return
        run.num_blocks -= len(hashes)
        ghost = run.ghost
        if ghost is not None and self._ghosts.get(ghost.hashes[-1]) is ghost:
            del self._ghosts[ghost.hashes[-1]]
            ghost.hashes += reversed(hashes)
        else:
            ghost = run.ghost = _Ghost(run, list(reversed(hashes)))
        self._num_ghosts += len(hashes)
        self._file(ghost)
        while self._num_ghosts > self._max_ghosts:
            oldest = self._ghosts.pop(next(iter(self._ghosts)))
            self._num_ghosts -= len(oldest.hashes)
            self._count(self._left, oldest, len(oldest.hashes))

    def used(
        self, path: Sequence[Span[_Key]], split: Callable[[_Key, int], _Key] | None = None
    ) -> None:
        self._request += 1
        num_blocks = sum(len(hashes) for _key, hashes in path)
        known, new = self._grouped(path)
        fresh = [block_hash for _key, hashes in new for block_hash in hashes]
        recalled = self._recall(fresh)
        runs: list[Run] = []
        others, before = None, -1  # what continued the last known point, and whose that was
        for run, keys, count in known:
            self._count(self._reused, run, count)
            others, before = run.follower, run.request
            if count < run.num_blocks:
                others, run = run, self._parted(run, keys, count)
            runs.append(run)
        if recalled.num_blocks:
            in_session = recalled.num_branches <= 1
        else:
            in_session = bool(runs) and self._continued(runs[-1], others, before, bool(fresh))
        for run in runs:
            run.num_uses += 1
            run.kind = _REUSED + _step(_NUM_USES, run.num_uses)
            run.used_s, run.request, run.ghost = self.now_s, self._request, None
        if in_session:
            num_tokens = (len(fresh) - recalled.num_blocks) * self._block_tokens
            kind = _APPENDED + _step(_APPENDED_TOKENS, num_tokens)
        else:
            kind = _step(_FRESH_TOKENS, num_blocks * self._block_tokens)
        runs += self._begun(new, recalled, kind, split)
        for run, follower in pairwise(runs):
            run.follower = follower
        if runs:
            runs[-1].follower = None
        if runs and path[-1][0] not in self._runs:  # no full block: it stays as long as its parent
            self._runs[path[-1][0]] = runs[-1]
        self._num_since += num_blocks
        self._learn()

    def _grouped(
        self, path: Sequence[Span[_Key]]
    ) -> tuple[list[tuple[Run, list[_Key], int]], list[Span[_Key]]]:
        """Neighbours of one run, and how many blocks they have; and what is of none yet."""
        known: list[tuple[Run, list[_Key], int]] = []
        new: list[Span[_Key]] = []
        for key, hashes in path:
            run = self._runs.get(key)
            if run is None:
                new.append((key, hashes))
            elif known and known[-1][0] is run:
                _run, keys, count = known[-1]
                keys.append(key)
                known[-1] = run, keys, count + len(hashes)
            else:
                known.append((run, [key], len(hashes)))
        return known, new

    def _continued(self, last: Run, others: Run | None, before: int, goes_on: bool) -> bool:
        """A request knows all down to `last`, and `goes_on` from there. Is that a session's next
        turn? At a point from where two went on already, it is not."""
        in_session = last.num_branches <= 1
        if goes_on:
            if in_session:
                self._supersede(others, before)
            last.num_branches = min(2, last.num_branches + 1)
        return in_session

    def _begun(
        self,
        new: Sequence[Span[_Key]],
        recalled: "_Recalled",
        kind: int,
        split: Callable[[_Key, int], _Key] | None,
    ) -> list[Run]:
        """Runs of what is new, which is of a `kind`; its first blocks had ghosts."""
        num_uses = recalled.num_uses + 1
        again = Run(_REUSED + _step(_NUM_USES, num_uses), num_uses, self.now_s, self._request)
        begun = Run(kind, 1, self.now_s, self._request)
        num_left = recalled.num_blocks
        for key, hashes in new:
            here = min(num_left, len(hashes))
            num_left -= here
            again.num_blocks += here
            begun.num_blocks += len(hashes) - here
            if 0 < here < len(hashes):
                assert split is not None
                self._runs[split(key, here)] = again
                self._runs[key] = begun
            elif hashes:
                self._runs[key] = again if here else begun
        return [run for run in (again, begun) if run.num_blocks]

    def _parted(self, run: Run, keys: list[_Key], count: int) -> Run:
        """Give the first blocks of a run a run of their own."""
        head = Run(run.kind, run.num_uses, run.used_s, run.request)
        head.num_blocks = count
        run.num_blocks -= count
        for key in keys:
            self._runs[key] = head
        return head

    def _recall(self, hashes: Sequence[BlockHash]) -> "_Recalled":
        """The ghosts of these blocks, from the first on; they end."""
        at, num_uses, num_branches = 0, 1, 1
        while at < len(hashes) and (ghost := self._ghosts.pop(hashes[at], None)) is not None:
            gone = ghost.hashes
            shared = 0
            for block_hash in hashes[at : at + len(gone)]:
                if gone[-1 - shared] != block_hash:
                    break
                shared += 1
            self._num_ghosts -= shared
            self._count(self._reused, ghost, shared)
            at += shared
            num_uses, num_branches = max(num_uses, ghost.num_uses), ghost.num_branches
            if shared < len(gone):
                del gone[-shared:]
                self._file(ghost)
                num_branches = 1
                break
        return _Recalled(at, num_uses, num_branches)

    def _file(self, ghost: _Ghost) -> None:
        """Keep a ghost by its first block, as the newest. One of that block before it is of no use:
        it was there again meanwhile."""
        other = self._ghosts.pop(ghost.hashes[-1], None)
        if other is not None:
            self._num_ghosts -= len(other.hashes)
        self._ghosts[ghost.hashes[-1]] = ghost

    def _supersede(self, run: Run | None, request: int) -> None:
        """The session of `request` goes on elsewhere: what it used last is its past."""
        while run is not None and run.request == request and run.kind != _SUPERSEDED:
            self._count(self._left, run, run.num_blocks)
            run.kind, run.used_s = _SUPERSEDED, self.now_s
            if run.leaf in self._offers:
                self._offer(run.leaf)
            run = run.follower

    def _count(self, table: list[list[float]], run: "Run | _Ghost", num_blocks: int) -> None:
        table[run.kind][_bin(self.now_s - run.used_s)] += num_blocks

    def _learn(self) -> None:
        """Go on learning, a bounded piece."""
        if self._learning is None:
            if self._num_since < self._learn_every:
                return
            self._num_since = 0
            self._learning = self._pieces()
        if next(self._learning, self) is self:
            self._learning = None

    def _pieces(self) -> Iterator[None]:
        waiting = [row.copy() for row in self._left]
        runs = list(dict.fromkeys(self._runs.values()))
        for start in range(0, len(runs), _AT_ONCE):
            for run in runs[start : start + _AT_ONCE]:
                self._count(waiting, run, run.num_blocks)
            yield
        ghosts = list(self._ghosts.values())
        for start in range(0, len(ghosts), _AT_ONCE):
            for ghost in ghosts[start : start + _AT_ONCE]:
                self._count(waiting, ghost, len(ghost.hashes))
            yield
        common = self._hazard(waiting)
        for kind in range(_NUM_KINDS):
            prior = _PRIOR * (_SUPERSEDED_PRIOR if kind == _SUPERSEDED else 1.0)
            at_risk = 0.0
            hazard = [0.0] * _NUM_BINS
            for a in reversed(range(_NUM_BINS)):
                at_risk += self._reused[kind][a] + waiting[kind][a]
                hazard[a] = (self._reused[kind][a] + prior * common[a]) / (at_risk + _PRIOR)
            self._index[kind] = [_best_ratio(hazard, a) for a in range(_NUM_BINS)]
            yield
        for table in (self._reused, self._left):
            for row in table:
                row[:] = [count * _DECAY for count in row]

    def _hazard(self, waiting: list[list[float]]) -> list[float]:
        hazard, at_risk = [0.0] * _NUM_BINS, 0.0
        for a in reversed(range(_NUM_BINS)):
            reused = sum(row[a] for row in self._reused[:_SUPERSEDED])
            at_risk += reused + sum(row[a] for row in waiting[:_SUPERSEDED])
            hazard[a] = reused / at_risk if at_risk else 0.0
        return hazard


def _best_ratio(hazard: Sequence[float], start: int) -> float:
    """The Gittins index at age bin `start`."""
    alive, chance, spent_s, best = 1.0, 0.0, 0.0, 0.0
    for a in range(start, _NUM_BINS - 1):
        chance += alive * hazard[a]
        spent_s += alive * (1 - hazard[a] / 2) * _WIDTHS[a]
        alive *= 1 - hazard[a]
        best = max(best, chance / max(spent_s, 1e-6))
        if _EDGES[a] > _HORIZON_S:
            break
    return best


GITTINS = Policy("gittins", Gittins)
