"""Transfer: carries out what the core wants of the tiers, beside the engine's steps.

Threads read and write between staging and the stores; only the engine's thread calls methods here,
touches the pool and tells the cache. A tier that hangs keeps the staging bytes of what it was
asked, and nothing else.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby

from foreword.core.block import TOKEN_BYTES, BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.lease import Drop, Load, Probe, Store
from foreword.core.stats import TierStats
from foreword.engine.kv import PagedKV
from foreword.engine.staging import Staging
from foreword.engine.workers import Workers
from foreword.store.codec import BadRecord, RecordKey, check, seal
from foreword.store.store import KVStore

log = logging.getLogger("foreword.engine")

STAGING_BYTES = 128 << 20  # for each tier and way
NUM_READERS = 4
PROBE_S = 0.05  # a request waits that long for what a shared tier has
LOAD_S = 0.25  # and for blocks that long
LOAD_BYTES_PER_S = 100e6  # and at this rate, with all that the tier was asked before
TICK_S = 1.0  # how often a store that has nothing to do may do what it put off
PAUSE_S = (1.0, 60.0)  # a tier that fails is left alone that long, then twice as long


@dataclass(slots=True, eq=False)
class _Read:
    """Some blocks of a load, in one staging cell."""

    load: Load
    start: int
    stop: int
    deadline_s: float
    begin_s: float = 0.0
    cell: int | None = None
    lost: dict[int, str] = field(default_factory=dict)  # why, by block
    failed: bool = False
    given_up: bool = False


class Breaker:
    """Whether to leave a failing place alone. Each failure after a pause makes the next longer."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._pause_s = PAUSE_S[0]

    def allows(self, now_s: float) -> bool:
        return now_s >= self._until_s

    def failed(self, now_s: float, what: str) -> None:
        if self.allows(now_s):
            log.warning("%s; left alone for %.0f s", what, self._pause_s)
            self._until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S[1])

    def succeeded(self) -> None:
        self._pause_s = PAUSE_S[0]


class Lane:
    """One tier's way in and out. What its threads finish lies in `done` until settled."""

    def __init__(self, number: int, store: KVStore, kv: PagedKV, wake: Callable[[], None]) -> None:
        self.number = number
        self.store = store
        self.inbound = Staging(kv, STAGING_BYTES)
        self.outbound = Staging(kv, STAGING_BYTES)
        self.readers = Workers(f"foreword-{store.name}-read", NUM_READERS)
        self.writer = Workers(f"foreword-{store.name}-write", 1)
        self.done: deque[Callable[[], None]] = deque()
        self.pending: deque[_Read] = deque()
        self.under_way: dict[_Read, None] = {}
        self.next_tick_s = 0.0
        self.num_overdue = 0  # reads that ran out of time and have not come back
        self.stats = TierStats(store.name)
        self.reading = Breaker()
        self.writing = Breaker()
        self._wake = wake

    @property
    def reads(self) -> Iterator[_Read]:
        """What was asked for and has not come."""
        return chain(self.under_way, self.pending)

    def finish(self, tell: Callable[[], None]) -> None:
        """Called by a thread: let the engine's do the rest."""
        self.done.append(tell)
        self._wake()

    def failed(self, breaker: Breaker, what: str) -> None:
        """Called by a thread, when its call did not work."""
        self.finish(lambda: breaker.failed(time.monotonic(), f"{self.store.name}: {what}"))


class Transfer:
    """`wake` is called by other threads when there is something to settle."""

    def __init__(
        self, cache: KVCache, kv: PagedKV, stores: Sequence[KVStore], wake: Callable[[], None]
    ) -> None:
        self._cache = cache
        self._kv = kv
        self._lanes = [Lane(number, store, kv, wake) for number, store in enumerate(stores)]
        self._asked: dict[Probe, float] = {}  # until when, by the monotonic clock
        self._found: list[tuple[Probe, int]] = []

    @property
    def stats(self) -> tuple[TierStats, ...]:
        """Counts by tier; what they keep now too."""
        for lane, tier in zip(self._lanes, self._cache.tiers, strict=True):
            lane.stats.num_blocks = tier.num_blocks
            lane.stats.num_bytes = lane.store.num_bytes
        return tuple(lane.stats for lane in self._lanes)

    def count_hits(self, restored: Mapping[int, int]) -> None:
        """Tokens of a prompt, by the tier that they came from."""
        for number, num_tokens in restored.items():
            self._lanes[number].stats.num_hit_tokens += num_tokens

    @property
    def description(self) -> str:
        """What the tiers are, in a line."""
        return (
            ", ".join(
                f"{lane.store.name} with {tier.num_blocks:,} of {tier.capacity:,} blocks"
                for lane, tier in zip(self._lanes, self._cache.tiers, strict=True)
            )
            or "nothing"
        )

    @property
    def has_news(self) -> bool:
        return any(lane.done for lane in self._lanes)

    @property
    def next_deadline_s(self) -> float | None:
        """When something has to be given up, by the monotonic clock. None: nothing is awaited."""
        waiting = list(self._asked.values())
        for lane in self._lanes:
            waiting += [read.deadline_s for read in lane.reads]
        return min(waiting, default=None)

    def perform(self, effects: Iterable[Load | Store | Drop | Probe]) -> None:
        """Begin what the cache or the scheduler asked for."""
        for effect in effects:
            lane = self._lanes[effect.tier]
            match effect:
                case Load():
                    self._load(lane, effect)
                case Store():
                    self._store(lane, effect)
                case Drop():
                    lane.writer.put(partial(self._delete, lane, effect))
                case Probe():
                    self._probe(lane, effect)

    def settle(self, busy_s: float) -> list[tuple[Probe, int]]:
        """Tell the cache what came and what did not. Returns what was found elsewhere. The engine
        computed for `busy_s` seconds since the last call: so much later is late."""
        now_s = time.monotonic()
        for lane, tier in zip(self._lanes, self._cache.tiers, strict=True):
            while lane.done:
                lane.done.popleft()()
            for read in lane.reads:
                read.deadline_s += busy_s
            if any(read.deadline_s <= now_s for read in lane.reads):
                self._give_up(lane)
            self._pump(lane)
            tier.reads = not lane.num_overdue and lane.reading.allows(now_s)
            tier.writes = lane.outbound.num_free > 0 and lane.writing.allows(now_s)
            if tier.capacity != lane.store.capacity:
                self._cache.resize(lane.number, lane.store.capacity)
            if now_s >= lane.next_tick_s and lane.outbound.num_free == lane.outbound.num_cells:
                lane.next_tick_s = now_s + TICK_S
                lane.writer.put(partial(self._delete, lane, Drop(lane.number, ())))
        for probe in [probe for probe, until_s in self._asked.items() if until_s <= now_s]:
            self._answer(probe, 0)
        self.perform(self._cache.take_effects())
        found, self._found = self._found, []
        return found

    def close(self, flush_s: float) -> None:
        """Let what is being written be written, for that long; then end."""
        end_s = time.monotonic() + flush_s
        for lane in self._lanes:
            lane.readers.close(0)
            if lane.writer.close(max(0.0, end_s - time.monotonic())):
                lane.store.close()

    def _load(self, lane: Lane, load: Load) -> None:
        num_blocks = sum(read.stop - read.start for read in lane.reads) + load.stop - load.start
        size = num_blocks * lane.inbound.record_bytes
        deadline_s = time.monotonic() + LOAD_S + size / LOAD_BYTES_PER_S
        step = lane.inbound.cell_blocks
        for start in range(load.start, load.stop, step):
            stop = min(start + step, load.stop)
            lane.pending.append(_Read(load, start, stop, deadline_s))
        self._pump(lane)

    def _pump(self, lane: Lane) -> None:
        """Start reads while staging has room."""
        while lane.pending:
            if lane.pending[0].load.lease.released:
                lane.pending.popleft()
                continue
            cell = lane.inbound.take()
            if cell is None:
                return
            read = lane.pending.popleft()
            read.cell, read.begin_s = cell, time.monotonic()
            lane.under_way[read] = None
            keys = _keys(read.load.lease.chain, range(read.start, read.stop))
            slots = lane.inbound.slots(cell, len(keys))
            lane.readers.put(partial(self._read, lane, read, keys, slots))

    def _read(
        self, lane: Lane, read: _Read, keys: list[RecordKey], slots: list[memoryview]
    ) -> None:
        """On a thread: bytes into staging, verified at once."""
        if read.given_up:
            lane.finish(partial(self._arrived, lane, read))
            return
        try:
            sizes = lane.store.get([key.block_hash for key in keys], slots)
            for at, (key, slot, size) in enumerate(zip(keys, slots, sizes, strict=True)):
                if not size:
                    read.lost[read.start + at] = "missing"
                    continue
                try:
                    check(slot[:size], key)
                except BadRecord as error:
                    read.lost[read.start + at] = "damaged"
                    log.warning("%s: block %s: %s", lane.store.name, key.block_hash.hex(), error)
        except Exception as error:  # noqa: BLE001 - whatever a store does, it is a miss
            read.failed = True
            lane.failed(lane.reading, f"reading failed: {error}")
        lane.finish(partial(self._arrived, lane, read))

    def _arrived(self, lane: Lane, read: _Read) -> None:
        assert read.cell is not None
        if read.given_up:
            lane.num_overdue -= 1
        else:
            del lane.under_way[read]
            lane.stats.read_s.add(time.monotonic() - read.begin_s)
            if not read.failed:
                lane.reading.succeeded()
            self._take_in(lane, read)
        lane.inbound.give(read.cell)

    def _take_in(self, lane: Lane, read: _Read) -> None:
        """Copy what is wanted still from staging into the lease's slots."""
        assert read.cell is not None
        lease = read.load.lease
        wanted = not lease.released
        if read.failed:
            read.lost = dict.fromkeys(range(read.start, read.stop), "failed")
        good = [at for at in range(read.start, read.stop) if at not in read.lost]
        if wanted and good:
            rows = lane.inbound.rows(read.cell, read.stop - read.start)
            if len(good) < len(rows):
                rows = rows[[at - read.start for at in good]]
            self._kv.write_blocks([lease.block_ids[at] for at in good], rows)
        for reason, run in groupby(range(read.start, read.stop), read.lost.get):
            blocks = list(run)
            start, stop = blocks[0], blocks[-1] + 1
            if reason is not None:
                lane.stats.count_lost(reason, stop - start)
                self._cache.lost(read.load, start, stop, gone=reason != "failed")
            elif wanted:
                lane.stats.num_loaded_blocks += stop - start
                self._cache.loaded(read.load, start, stop)

    def _give_up(self, lane: Lane) -> None:
        """One read is late: what the tier was asked is lost, so that nobody waits behind it. Its
        threads may come back when they can."""
        reads = list(lane.reads)
        lane.num_overdue += len(lane.under_way)
        lane.pending.clear()
        lane.under_way.clear()
        for read in reads:
            read.given_up = True
            if not read.load.lease.released:
                lane.stats.count_lost("late", read.stop - read.start)
                self._cache.lost(read.load, read.start, read.stop, gone=False)
        log.warning("%s: a read came too late; %d given up", lane.store.name, len(reads))

    def _store(self, lane: Lane, store: Store) -> None:
        step = lane.outbound.cell_blocks
        for first in range(0, len(store.block_ids), step):
            cell = lane.outbound.take()
            if cell is None:  # what follows needs these
                hashes = store.chain.hashes[store.start :][first : len(store.block_ids)]
                lane.stats.num_dropped_blocks += len(hashes)
                self._cache.stored(lane.number, hashes, ok=False)
                return
            block_ids = store.block_ids[first : first + step]
            start = store.start + first
            keys = _keys(store.chain, range(start, start + len(block_ids)))
            self._kv.read_blocks(block_ids, lane.outbound.rows(cell, len(keys)))
            lane.writer.put(partial(self._write, lane, cell, keys))

    def _write(self, lane: Lane, cell: int, keys: list[RecordKey]) -> None:
        """On the tier's writing thread."""
        begin_s = time.monotonic()
        size = lane.outbound.record_bytes
        records = [slot[:size] for slot in lane.outbound.slots(cell, len(keys))]
        try:
            for key, record in zip(keys, records, strict=True):
                seal(record, key)
            kept = lane.store.put(keys, records)
        except Exception as error:  # noqa: BLE001 - whatever a store does, it is not kept
            lane.failed(lane.writing, f"writing failed: {error}")
            kept = [False] * len(keys)
        lane.outbound.give(cell)
        seconds = time.monotonic() - begin_s
        lane.finish(partial(self._written, lane, keys, kept, seconds))

    def _written(self, lane: Lane, keys: list[RecordKey], kept: list[bool], seconds: float) -> None:
        lane.stats.write_s.add(seconds)
        lane.stats.num_stored_blocks += sum(kept)
        for ok in (True, False):
            hashes = [k.block_hash for k, was in zip(keys, kept, strict=True) if was is ok]
            self._cache.stored(lane.number, hashes, ok=ok)
        if all(kept):
            lane.writing.succeeded()
        else:
            lane.writing.failed(time.monotonic(), f"{lane.store.name}: no room to write")

    def _delete(self, lane: Lane, drop: Drop) -> None:
        """On the writing thread. What cannot be deleted is never served wrong."""
        try:
            lane.store.delete(drop.hashes)
        except Exception as error:  # noqa: BLE001 - as in _write
            lane.failed(lane.writing, f"deleting failed: {error}")

    def _probe(self, lane: Lane, probe: Probe) -> None:
        self._asked[probe] = time.monotonic() + PROBE_S
        hashes = probe.chain.hashes[probe.start :]
        lane.readers.put(partial(self._ask, lane, probe, hashes))

    def _ask(self, lane: Lane, probe: Probe, hashes: list[BlockHash]) -> None:
        """On a reading thread."""
        num_blocks = 0
        try:
            there = lane.store.contains(hashes)
            num_blocks = there.index(False) if False in there else len(there)
        except Exception as error:  # noqa: BLE001 - nothing is found
            lane.failed(lane.reading, f"asking failed: {error}")
        lane.finish(partial(self._answer, probe, num_blocks))

    def _answer(self, probe: Probe, num_blocks: int) -> None:
        if self._asked.pop(probe, None) is not None:
            self._found.append((probe, num_blocks))


def _keys(tokens: Chain, blocks: range) -> list[RecordKey]:
    width = tokens.block_size * TOKEN_BYTES
    return [
        RecordKey(
            tokens.root,
            tokens.hashes[at - 1] if at else tokens.root,
            tokens.hashes[at],
            at,
            bytes(tokens.key[at * width : (at + 1) * width]),
        )
        for at in blocks
    ]
