"""TierLane: one tier's reads in virtual time.

As the engine's own lane: a load is read in pieces, some readers at once. The latencies of their
reads overlap, their bytes come one after another. A piece that stalls comes late, and holds up its
reader alone.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from math import inf
from random import Random

from foreword.core.cost import TierFit
from foreword.core.lease import Load
from foreword.sim.shape import STUCK_S, TierRoom
from foreword.store.patience import LOAD_BYTES_PER_S, LOAD_S, USUALLY, Breaker


@dataclass(slots=True, eq=False)
class Piece:
    """Blocks `start` to `stop` of a load, read at once."""

    load: Load
    start: int
    stop: int
    deadline_s: float
    num_bytes: int
    begin_s: float = -1.0  # when there was room for it
    start_s: float = -1.0  # when a reader took it
    ahead_bytes: int = 0  # that were under way then, its own too
    given_up: bool = False

    @property
    def is_wanted(self) -> bool:
        return self.load.probe or any(map(self.load.awaits, range(self.start, self.stop)))


class TierLane:
    """The pieces that were asked for wait for room to be read into, then for a reader; `settle`
    says which came and which are given up. Same `seed`, same stalls."""

    def __init__(
        self, room: TierRoom, block_bytes: int, seed: int = 0, fit: TierFit | None = None
    ) -> None:
        """`fit` learns what reads take."""
        self._room = room
        self._reading = room.reading
        self._num_readers = room.reading.num_readers
        self._block_bytes = block_bytes
        self._fit = fit
        self._draw = Random(seed)
        self._pending: deque[Piece] = deque()  # without room
        self._queued: deque[Piece] = deque()  # with room, without a reader
        self._active: list[tuple[float, int, Piece]] = []  # when each comes, in a heap
        self._num_begun = 0
        self._patient_s = inf  # nothing is late before
        self._num_held = 0  # cells
        self._held_bytes = 0  # of pieces in them that are not given up
        self._queued_bytes = 0  # asked for, and not come
        self._link_s = 0.0  # until when bytes come
        self._breaker = Breaker()

    @property
    def next_s(self) -> float | None:
        """When there is something to settle. None: nothing is awaited."""
        if not self._active:
            return None
        return min(self._active[0][0], self._patient_s)

    def allows(self, now_s: float) -> bool:
        """Whether the tier is to be asked for anything."""
        overdue = any(piece.given_up for _end_s, _number, piece in self._active)
        return not overdue and self._breaker.allows(now_s)

    def load(self, load: Load, now_s: float) -> None:
        """Read the blocks of a load, behind what was asked before."""
        num_bytes = self._queued_bytes + (load.stop - load.start) * self._block_bytes
        usual_s = self._fit.load_s(num_bytes) if self._fit is not None else 0.0
        patience_s = LOAD_S + max(num_bytes / LOAD_BYTES_PER_S, USUALLY * usual_s)
        deadline_s = now_s + patience_s if self._reading.gives_up else inf
        self._patient_s = min(self._patient_s, deadline_s)
        step = max(1, self._reading.cell_bytes // max(1, self._block_bytes))
        starts = range(load.start, load.stop, step)
        for start in starts if self._reading.from_front else reversed(starts):
            stop = min(start + step, load.stop)
            piece = Piece(load, start, stop, deadline_s, (stop - start) * self._block_bytes)
            self._pending.append(piece)
            self._queue(piece.num_bytes)
        self._pump(now_s)

    def settle(self, now_s: float, busy_s: float = 0.0) -> list[tuple[Piece, float | None]]:
        """What came since the last call, and in how many seconds; None where it is given up. The
        engine computed for `busy_s` meanwhile."""
        news: list[tuple[Piece, float | None]] = []
        while self._active and self._active[0][0] <= now_s:
            end_s, _number, piece = heappop(self._active)
            self._num_held -= 1
            if self._fit is not None:
                self._fit.add(piece.ahead_bytes, end_s - piece.begin_s)
            if not piece.given_up:
                self._queue(-piece.num_bytes)
                self._held_bytes -= piece.num_bytes
                self._breaker.succeeded()
                news.append((piece, end_s - piece.begin_s))
            self._begin(end_s)
        if self._reading.gives_up:
            for piece in self._pending:
                piece.deadline_s += busy_s
            self._spare(now_s)
            if now_s >= self._patient_s:
                self._patient_s = min((piece.deadline_s for piece in self._asked()), default=inf)
            if now_s >= self._patient_s:
                news += [(piece, None) for piece in self._give_up(now_s)]
        self._pump(now_s)
        return news

    def _spare(self, now_s: float) -> None:
        """As many readers as ever beside those that are stuck."""
        num_stuck = sum(now_s - piece.start_s > STUCK_S for _end_s, _number, piece in self._active)
        most = min(self._reading.num_readers + num_stuck, self._reading.most_readers)
        self._num_readers = max(self._num_readers, most)

    def _give_up(self, now_s: float) -> list[Piece]:
        """All that was asked for: one is late."""
        given_up = list(self._asked())
        for piece in given_up:
            piece.given_up = True
            self._queue(-piece.num_bytes)
        self._patient_s = inf
        self._num_held -= len(self._queued)
        self._held_bytes = 0
        self._queued.clear()
        self._pending.clear()
        self._breaker.failed(now_s, f"{self._room.name}: a read came too late")
        return given_up

    def _queue(self, num_bytes: int) -> None:
        """So many bytes more were asked for, or less are to come."""
        self._queued_bytes += num_bytes
        if self._fit is not None:
            self._fit.queued_bytes += num_bytes

    def _asked(self) -> Iterator[Piece]:
        """What was asked for and has neither come nor been given up."""
        active = (piece for _end_s, _number, piece in self._active if not piece.given_up)
        return chain(active, self._queued, self._pending)

    def _pump(self, now_s: float) -> None:
        while self._pending and self._num_held < self._reading.num_cells:
            piece = self._pending.popleft()
            if not piece.is_wanted:
                self._queue(-piece.num_bytes)
                continue
            self._num_held += 1
            self._held_bytes += piece.num_bytes
            piece.begin_s, piece.ahead_bytes = now_s, self._held_bytes
            self._queued.append(piece)
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        while self._queued and len(self._active) < self._num_readers:
            piece = self._queued.popleft()
            piece.start_s = now_s
            self._num_begun += 1
            heappush(self._active, (self._end_s(piece, now_s), self._num_begun, piece))

    def _end_s(self, piece: Piece, now_s: float) -> float:
        cost = self._room.cost_at(now_s)
        load_s = cost.load_s(piece.num_bytes)
        latency_s = min(load_s, cost.latency_s)
        first_s, bytes_s = now_s + latency_s, load_s - latency_s
        if self._reading.stall_share and self._draw.random() < self._reading.stall_share:
            least_s, most_s = self._reading.stall_s
            stall_s: float = least_s * (most_s / least_s) ** self._draw.random()
            return first_s + stall_s + bytes_s
        self._link_s = max(self._link_s, first_s) + bytes_s
        return self._link_s
