"""Gittins: evict what is least worth its room, by how soon such blocks were needed again before.

Blocks that came and were last used together are a Run, and a run has a kind: how large the prompt
was that it came with, how much a session appended with it, how often it was used, whether its
session went on elsewhere. For each kind it is learned after how many seconds such blocks are used
again, from those that were and, censored, from those that still wait, here or as ghosts of what was
evicted. The Gittins index of a kind at an age is the best ratio of the chance of a use to the
block-seconds spent on waiting for it, over all ages to stop at (Gittins 1979; for caches with
Kaplan-Meier hazards). The least index leaves first; before anything is known that is the oldest.

Work per call is bounded: a table is learned anew piece by piece, over many requests.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

from foreword.core.policies.runs import Ghost, Run, RunOrder
from foreword.core.policy import Policy

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
    return max(0, min(_NUM_BINS, bisect_right(_EDGES, age_s)) - 1)


class Gittins(RunOrder[_Key]):
    """The order of one place with room for `capacity` blocks of `block_tokens` tokens."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(_NUM_KINDS, _GHOSTS * capacity)
        self._block_tokens = block_tokens
        self._learn_every = max(2000, capacity // 4)  # blocks used
        self._num_since = 0
        self._learning: Iterator[None] | None = None
        self._waiting: deque[Run] = deque()  # all runs and ghosts, and some that ended
        self._reused = [[0.0] * _NUM_BINS for _ in range(_NUM_KINDS)]  # blocks, by kind and age
        self._left = [[0.0] * _NUM_BINS for _ in range(_NUM_KINDS)]  # that nobody waits for now
        self._index = [[1 / (1 + edge) for edge in _EDGES[:-1]] for _ in range(_NUM_KINDS)]

    def choose(self) -> _Key | None:
        least: tuple[float, float, int] | None = None
        chosen: _Key | None = None
        for kind, queue in enumerate(self.queues):
            if queue and (first := queue.first()) is not None:
                used_s, serial, key = first
                worth = self._index[kind][_bin(self.now_s - used_s)], used_s, serial
                if least is None or worth < least:
                    least, chosen = worth, key
        return chosen

    def begin(self, known: list[Run], recalled: Run, num_fresh: int) -> int:
        num_blocks = num_fresh + recalled.num_blocks
        for run in known:
            num_blocks += run.num_blocks
            self._count(self._reused, run, run.num_blocks)
        if recalled.num_blocks:
            in_session = not recalled.continued
        else:
            in_session = bool(known) and self._goes_on(known[-1], num_fresh)
        self._num_since += num_blocks
        self._learn()
        if in_session:
            return _APPENDED + bisect_left(_APPENDED_TOKENS, num_fresh * self._block_tokens)
        return bisect_left(_FRESH_TOKENS, num_blocks * self._block_tokens)

    def reuse(self, run: Run) -> None:
        self.sort(run, _REUSED + bisect_left(_NUM_USES, run.num_uses))

    def recall(self, ghost: Ghost, num_blocks: int) -> None:
        self._count(self._reused, ghost, num_blocks)

    def forget(self, ghost: Ghost) -> None:
        self._count(self._left, ghost, ghost.num_blocks)

    def made(self, run: Run) -> None:
        self._waiting.append(run)

    def _goes_on(self, last: Run, num_fresh: int) -> bool:
        """A request knows all down to `last`. Is what follows a session's next turn? It is not at a
        point from where one went on already."""
        in_session = not last.continued
        if num_fresh:
            if in_session:
                self._supersede(last.follower, last.request)
            last.continued = True
        return in_session

    def _supersede(self, run: Run | None, request: int) -> None:
        """The session of `request` goes on elsewhere: what it used last is its past."""
        while run is not None and run.request == request and run.kind != _SUPERSEDED:
            self._count(self._left, run, run.num_blocks)
            self.sort(run, _SUPERSEDED)
            run.used_s = self.now_s
            if run.leaf in self.candidates and self._runs.get(run.leaf) is run:
                self.offer_run(run.leaf, run)
            run = run.follower

    def _count(self, table: list[list[float]], run: Run, num_blocks: int) -> None:
        table[run.kind][_bin(self.now_s - run.used_s)] += num_blocks

    def _learn(self) -> None:
        """Go on learning, a bounded piece."""
        if self._learning is None and self._num_since >= self._learn_every:
            self._num_since, self._learning = 0, self._pieces()
        if self._learning is not None and next(self._learning, self) is self:
            self._learning = None

    def _pieces(self) -> Iterator[None]:
        waiting = [row.copy() for row in self._left]
        for number in range(len(self._waiting)):
            run = self._waiting.popleft()
            if run.num_blocks:
                self._count(waiting, run, run.num_blocks)
                self._waiting.append(run)
            if number % _AT_ONCE == 0:
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
