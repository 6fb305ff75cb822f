"""Transfer: carries out what the core wants of the tiers, beside the engine's steps.

Threads read and write between staging and the stores, and verify what they read; only the engine's
thread calls methods here, touches the pool and tells the cache. A tier that hangs keeps the staging
bytes of what it was asked, and nothing else.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from foreword.core.block import TOKEN_BYTES, BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.lease import Drop, Load, Probe, Store
from foreword.core.restore import PROBE_S as TRY_S
from foreword.core.stats import TierStats
from foreword.core.tier import Tier
from foreword.engine.kv import PagedKV
from foreword.engine.lane import NUM_READERS, Lane, Read
from foreword.store.codec import RecordKey, kv_offset, seal
from foreword.store.patience import LOAD_BYTES_PER_S, LOAD_S, PROBE_S, TEND_S, USUALLY
from foreword.store.store import KVStore, why_lost

log = logging.getLogger("foreword.engine")


class Transfer:
    """`wake` is called by other threads when there is something to settle. `num_blocks` is how many
    blocks a step may fill: twice as many can wait to be written."""

    def __init__(
        self,
        cache: KVCache,
        kv: PagedKV,
        stores: Sequence[KVStore],
        num_blocks: int,
        wake: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._kv = kv
        costs = cache.restores.costs
        fits = costs.tiers if costs is not None else [None] * len(stores)
        self.lanes = [
            Lane(number, store, kv, 2 * num_blocks, wake, fit)
            for number, (store, fit) in enumerate(zip(stores, fits, strict=True))
        ]
        self._asked: dict[Probe, float] = {}  # until when, by the monotonic clock
        self._found: list[tuple[Probe, int]] = []

    @property
    def stats(self) -> tuple[TierStats, ...]:
        """Counts by tier, and what it takes of its place. For any thread."""
        restores = self._cache.restores
        return tuple(
            replace(
                lane.stats,
                num_bytes=lane.store.num_bytes,
                enabled=tier.enabled and tier.reads,
                ledger=switch.ledger,
            )
            for lane, tier, switch in zip(
                self.lanes, restores.tiers, restores.switches, strict=False
            )
        )

    def count_hits(self, restored: Mapping[int, int]) -> dict[str, int]:
        """Tokens of a prompt, by the tier that they came from. Returns them by its name."""
        for number, num_tokens in restored.items():
            self.lanes[number].stats.num_hit_tokens += num_tokens
        return {self.lanes[number].store.name: num for number, num in restored.items()}

    @property
    def facts(self) -> dict[str, str]:
        """What the server says of its tiers at start, by name."""
        return {
            lane.store.name: f"{lane.store.capacity * lane.inbound.slot_bytes / (1 << 30):,.1f} GiB"
            f" for KV, {tier.num_blocks * self._kv.block_size:,} tokens found there"
            for lane, tier in zip(self.lanes, self._cache.lower.tiers, strict=True)
        }

    @property
    def has_news(self) -> bool:
        return any(lane.done for lane in self.lanes)

    @property
    def next_deadline_s(self) -> float | None:
        """When something has to be given up, by the monotonic clock. None: nothing is awaited."""
        waiting = list(self._asked.values())
        for lane in self.lanes:
            waiting += [read.deadline_s for read in lane.reads]
        return min(waiting, default=None)

    def perform(self, effects: Iterable[Load | Store | Drop | Probe]) -> None:
        """Begin what the cache or the scheduler asked for."""
        for effect in effects:
            lane = self.lanes[effect.tier]
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
        computed for `busy_s` seconds since the last call: what could not begin meanwhile, for it
        waits for staging, may come so much later."""
        now_s = time.monotonic()
        for lane, tier in zip(self.lanes, self._cache.lower.tiers, strict=True):
            while lane.done:
                lane.done.popleft()()
            for read in lane.pending:
                read.deadline_s += busy_s
            if any(read.deadline_s <= now_s for read in lane.reads):
                self._give_up(lane)
            self._pump(lane)
            lane.spare(now_s)
            tier.shared = lane.store.has_others
            tier.reads = not lane.num_overdue and lane.reading.allows(now_s)
            tier.writes = lane.outbound.num_free > 0 and lane.writing.allows(now_s)
            self._turn(lane, tier, now_s)
            if tier.capacity != lane.store.capacity:
                self._cache.lower.resize(lane.number, lane.store.capacity)
            if now_s >= lane.next_tend_s and not lane.tending:
                lane.next_tend_s, lane.tending = now_s + TEND_S, True
                lane.writer.put(partial(self._tend, lane))
        for probe in [probe for probe, until_s in self._asked.items() if until_s <= now_s]:
            del self._asked[probe]
            self._found.append((probe, 0))
            self.lanes[probe.tier].num_overdue += 1
        self.perform(self._cache.lower.take_effects())
        found, self._found = self._found, []
        return found

    def _turn(self, lane: Lane, tier: Tier, now_s: float) -> None:
        """Say when a tier was turned off or on. One that is off is tried, by whom nobody waits."""
        if not tier.enabled and tier.reads and lane.last is not None:
            if now_s >= tier.next_probe_s and not lane.under_way:
                tier.next_probe_s = now_s + TRY_S
                self._load(lane, lane.last)
            self._cache.restores.retry(lane.number)
        if lane.enabled is not tier.enabled:
            lane.enabled = tier.enabled
            turned = "on again" if lane.enabled else "off"
            why = self._cache.restores.switches[lane.number].why
            log.warning("%s: turned %s: %s", lane.store.name, turned, why)

    def close(self, flush_s: float) -> None:
        """Let what is being written be written and close the stores, in that time; what hangs is
        left to the end of the process."""
        end_s = time.monotonic() + flush_s
        for lane in self.lanes:
            if lane.readers.close(max(0.0, end_s - time.monotonic())):
                lane.writer.put(partial(self._close, lane))
            lane.writer.close(max(0.0, end_s - time.monotonic()))

    def when_written(self, call: Callable[[], None]) -> None:
        """Call this, from some thread, when all that was asked so far is written or dropped."""
        left = [len(self.lanes)]

        def done() -> None:
            left[0] -= 1
            if not left[0]:
                call()

        for lane in self.lanes:
            lane.writer.put(partial(lane.finish, done))
        if not self.lanes:
            call()

    def _load(self, lane: Lane, load: Load) -> None:
        num_blocks = sum(read.stop - read.start for read in lane.reads) + load.stop - load.start
        size = num_blocks * lane.inbound.record_bytes
        usual_s = lane.fit.load_s(size) if lane.fit is not None else 0.0
        deadline_s = time.monotonic() + LOAD_S + max(size / LOAD_BYTES_PER_S, USUALLY * usual_s)
        step = lane.inbound.cell_blocks
        for stop in range(load.stop, load.start, -step):  # the front may be computed meanwhile
            start = max(load.start, stop - step)
            num_bytes = (stop - start) * lane.inbound.record_bytes
            lane.pending.append(Read(load, start, stop, deadline_s, num_bytes))
            lane.queue(num_bytes)
        lane.last = replace(load, start=max(load.start, load.stop - NUM_READERS * step), probe=True)
        self._pump(lane)

    def _pump(self, lane: Lane) -> None:
        """Start reads while staging has room."""
        while lane.pending:
            first = lane.pending[0]
            if not (
                first.load.probe or any(map(first.load.awaits, range(first.start, first.stop)))
            ):
                lane.queue(-lane.pending.popleft().num_bytes)
                continue
            cell = lane.inbound.take()
            if cell is None:
                return
            read = lane.pending.popleft()
            read.cell, read.begin_s = cell, time.monotonic()
            lane.under_way[read] = None
            read.ahead_bytes = sum(other.num_bytes for other in lane.under_way)
            keys = _keys(read.load.lease.chain, range(read.start, read.stop))
            lane.readers.put(partial(self._read, lane, read, keys, cell))

    def _read(self, lane: Lane, read: Read, keys: list[RecordKey], cell: int) -> None:
        """On a thread: find the records and verify them at once."""
        if read.given_up:
            lane.finish(partial(self._arrived, lane, read))
            return
        begin_s = read.start_s = time.monotonic()
        try:
            loans = lane.fetch([key.block_hash for key in keys], cell)
            for at, (key, loan) in enumerate(zip(keys, loans, strict=True), read.start):
                lost = why_lost(loan, key)
                if loan is not None and lost is None:
                    read.good[at] = loan
                elif lost is not None:
                    read.lost[at], what = lost
                    if read.lost[at] == "damaged":
                        read.error = what
        except Exception as error:  # noqa: BLE001 - whatever a store does, it is a miss
            read.failed = True
            lane.failed(lane.reading, f"reading failed: {error}")
        read.end_s = time.monotonic()
        read.busy_s = read.end_s - begin_s
        lane.finish(partial(self._arrived, lane, read))

    def _arrived(self, lane: Lane, read: Read) -> None:
        assert read.cell is not None
        if lane.fit is not None and read.good:
            lane.fit.add(read.ahead_bytes, read.end_s - read.begin_s)
        if read.given_up:
            lane.num_overdue -= 1
        else:
            del lane.under_way[read]
            lane.queue(-read.num_bytes)
            lane.stats.read_s.add(time.monotonic() - read.begin_s)
            lane.stats.busy_s += read.busy_s
            self._take_in(lane, read)
        lane.inbound.give(read.cell)

    def _take_in(self, lane: Lane, read: Read) -> None:
        """Copy what is wanted still into the lease's slots. What the store did not keep until it
        was copied may be anything: it is lost, and nothing has read it."""
        load, lease = read.load, read.load.lease
        if read.failed:
            read.lost = dict.fromkeys(range(read.start, read.stop), "failed")
            read.good.clear()
        if read.error:
            log.warning("%s: of %d lost, %s", lane.store.name, len(read.lost), read.error)
        wanted = {at: loan for at, loan in read.good.items() if load.awaits(at)}
        if wanted:
            kv_start = kv_offset(self._kv.block_size)
            rows = [loan.record[kv_start:] for loan in wanted.values()]
            self._kv.write_blocks([lease.block_ids[at] for at in wanted], rows)
            read.lost |= {at: "missing" for at, loan in wanted.items() if not loan.kept()}
        if not (load.probe or lease.released):
            read.lost |= {at: "late" for at in read.good if at not in wanted}
        for reason, run in groupby(range(read.start, read.stop), read.lost.get):
            blocks = list(run)
            start, stop = blocks[0], blocks[-1] + 1
            if reason is not None:
                lane.stats.count_lost(reason, stop - start)
                self._cache.lost(load, start, stop, gone=reason in ("missing", "damaged"))
            elif blocks[0] in wanted:
                lane.reading.succeeded()
                lane.stats.num_loaded_blocks += stop - start
                self._cache.loaded(load, start, stop)

    def _give_up(self, lane: Lane) -> None:
        """One read is late: what the tier was asked is lost, so that nobody waits behind it. Its
        threads may come back when they can."""
        reads = list(lane.reads)
        lane.num_overdue += len(lane.under_way)
        lane.pending.clear()
        lane.under_way.clear()
        for read in reads:
            read.given_up = True
            lane.queue(-read.num_bytes)
            if not read.load.lease.released:
                lane.stats.count_lost("late", read.stop - read.start)
                self._cache.lost(read.load, read.start, read.stop, gone=False)
        lane.reading.failed(
            time.monotonic(), f"{lane.store.name}: a read came too late, {len(reads)} given up"
        )

    def _store(self, lane: Lane, store: Store) -> None:
        step = lane.outbound.cell_blocks
        for first in range(0, len(store.block_ids), step):
            cell = lane.outbound.take()
            if cell is None:  # what follows needs these
                hashes = store.chain.hashes[store.start :][first : len(store.block_ids)]
                lane.stats.num_dropped_blocks += len(hashes)
                self._cache.lower.stored(lane.number, hashes, ok=False)
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
            self._cache.lower.stored(lane.number, hashes, ok=ok)
        if all(kept):
            lane.writing.succeeded()
        else:
            lane.writing.failed(time.monotonic(), f"{lane.store.name}: no room to write")

    def _tend(self, lane: Lane) -> None:
        """On the writing thread."""
        try:
            lane.store.tend()
        except Exception as error:  # noqa: BLE001 - as in _write
            lane.failed(lane.writing, f"tending failed: {error}")
        lane.tending = False

    def _close(self, lane: Lane) -> None:
        """On the writing thread, its last call."""
        try:
            lane.store.close()
        except Exception as error:  # noqa: BLE001 - as in _write
            log.warning("%s: closing failed: %s", lane.store.name, error)

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
        if self._asked.pop(probe, None) is None:
            self.lanes[probe.tier].num_overdue -= 1
        else:
            self._found.append((probe, num_blocks))


def _keys(chain: Chain, blocks: range) -> list[RecordKey]:
    width = chain.block_size * TOKEN_BYTES
    return [
        RecordKey(
            chain.root,
            chain.hashes[at - 1] if at else chain.root,
            chain.hashes[at],
            at,
            bytes(chain.key[at * width : (at + 1) * width]),
        )
        for at in blocks
    ]
