"""Lane: one tier's way in and out: its store, staging, threads, and what was asked of it."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from foreword.core.block import BlockHash
from foreword.core.cost import TierFit
from foreword.core.lease import Load
from foreword.core.stats import TierStats
from foreword.engine.kv import PagedKV
from foreword.engine.staging import Staging
from foreword.store.patience import Breaker
from foreword.store.store import KVStore, Loan
from foreword.store.workers import Workers

STAGING_BYTES = 128 << 20  # for each tier and way, at least
NUM_READERS = 4
# One that takes longer has another reader beside it, so that those behind it need not wait for it.
STUCK_S, MOST_READERS = 0.05, 16


@dataclass(slots=True, eq=False)
class Read:
    """Some blocks of a load: their records, in one staging cell or where the store lends them."""

    load: Load
    start: int
    stop: int
    deadline_s: float
    num_bytes: int
    begin_s: float = 0.0
    ahead_bytes: int = 0  # under way when it began, its own too
    end_s: float = 0.0
    start_s: float = inf  # when a thread took it
    busy_s: float = 0.0  # of its thread
    cell: int | None = None
    good: dict[int, Loan] = field(default_factory=dict)  # verified, by block
    lost: dict[int, str] = field(default_factory=dict)  # why, by block
    failed: bool = False
    given_up: bool = False
    error: str = ""  # what is wrong with the damaged ones, the last of them


class Lane:
    """One tier's way in and out. What its threads finish lies in `done` until settled."""

    def __init__(
        self,
        number: int,
        store: KVStore,
        kv: PagedKV,
        num_blocks: int,
        wake: Callable[[], None],
        fit: TierFit | None,
    ) -> None:
        """`num_blocks` can be on their way out. `fit` learns what reads take."""
        self.number = number
        self.store = store
        self.fit = fit
        # What is lent needs no staging, but its cells bound what is under way all the same. A GPU
        # reads pinned memory only at its full speed.
        self._lend = store.lend if kv.keys[0].device.type == "cpu" else None
        self.inbound = Staging(kv, STAGING_BYTES)
        self.outbound = Staging(kv, max(STAGING_BYTES, num_blocks * self.inbound.slot_bytes))
        self.readers = Workers(f"foreword-{store.name}-read", NUM_READERS)
        self.writer = Workers(f"foreword-{store.name}-write", 1)
        self.done: deque[Callable[[], None]] = deque()
        self.pending: deque[Read] = deque()
        self.under_way: dict[Read, None] = {}
        self.next_tend_s, self.tending = 0.0, False
        self.num_overdue = 0  # calls that ran out of time and have not come back
        self.stats = TierStats(store.name)
        self.enabled = True  # as was said last
        self.last: Load | None = None  # what to try it with
        self.reading = Breaker()
        self.writing = Breaker()
        self._wake = wake

    def queue(self, num_bytes: int) -> None:
        """So many bytes more were asked for, or less are to come."""
        if self.fit is not None:
            self.fit.queued_bytes += num_bytes

    def spare(self, now_s: float) -> None:
        """Have as many readers as ever beside those that are stuck."""
        num_stuck = sum(now_s - read.start_s > STUCK_S for read in self.under_way)
        self.readers.grow(min(NUM_READERS + num_stuck, MOST_READERS))

    @property
    def reads(self) -> Iterator[Read]:
        """What was asked for and has not come."""
        return chain(self.under_way, self.pending)

    def fetch(self, hashes: list[BlockHash], cell: int) -> list[Loan | None]:
        """Called by a thread: records as the store lends them, or in staging."""
        if self._lend is not None:
            return self._lend(hashes)
        slots = self.inbound.slots(cell, len(hashes))
        sizes = self.store.get(hashes, slots)
        return [
            Loan(slot[:size]) if size else None for slot, size in zip(slots, sizes, strict=True)
        ]

    def finish(self, tell: Callable[[], None]) -> None:
        """Called by a thread: let the engine's do the rest."""
        self.done.append(tell)
        self._wake()

    def failed(self, breaker: Breaker, what: str) -> None:
        """Called by a thread, when its call did not work."""
        self.finish(lambda: breaker.failed(time.monotonic(), f"{self.store.name}: {what}"))
