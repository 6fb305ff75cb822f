"""Place: one store as plug-ins use it: what it has, the threads that may hang there, what it did.

The core's Tier keeps the order in which blocks leave; the store keeps the bytes.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from foreword.core.block import BlockHash
from foreword.core.policy import LRU
from foreword.core.stats import TierStats
from foreword.core.tier import Tier
from foreword.plugins.load import Load, Piece
from foreword.store.codec import HEADER_BYTES, RecordKey, record_bytes, seal
from foreword.store.pages import arena, whole_pages
from foreword.store.patience import LOAD_S, TEND_S, Breaker
from foreword.store.store import KVStore, Loan, why_lost
from foreword.store.workers import Workers

log = logging.getLogger("foreword.plugins")

NUM_READERS = 4
CELL_BYTES = 2 << 20  # of one read or write: many small ones are what makes SSDs slow
STAGING_BYTES = 128 << 20  # that may wait to be written, at least
_MOST_SHUNNED = 4096


class Place:
    """Records of blocks that are `payload_bytes` long, in one store."""

    def __init__(self, store: KVStore, payload_bytes: int) -> None:
        self.store = store
        self.stats = TierStats(store.name)
        # Engines tell of uses piece by piece, not of whole prompts, which LRU alone can do with.
        self.tier = Tier(store.capacity, shared=store.shared, policy=LRU)
        self.tier.restore((entry.block_hash, entry.parent) for entry in store.entries())
        self.record_bytes = record_bytes(0, payload_bytes)
        self.slot_bytes = whole_pages(self.record_bytes)
        self.cell_blocks = max(1, CELL_BYTES // self.slot_bytes)
        num_slots = max(4 * self.cell_blocks, STAGING_BYTES // self.slot_bytes)
        self._staging = memoryview(arena(num_slots * self.slot_bytes))
        self._free = deque(range(num_slots))
        self._buffers = threading.local()  # each reader's own: a hung one holds no more than that
        self._lock = threading.Lock()  # of tier and all below; never held while a store is called
        self._pieces: dict[Piece, None] = {}  # given to the readers, and awaited
        self._num_overdue = 0  # no longer awaited, and not come back
        self._asked: dict[object, float] = {}  # what it has, since when; the oldest first
        # Records of others that were damaged: they cannot be deleted, only kept once more.
        self._shunned: dict[BlockHash, None] = {}
        self._reading, self._writing = Breaker(), Breaker()
        self.readers = Workers(f"foreword-{store.name}-read", NUM_READERS)
        self.writer = Workers(f"foreword-{store.name}-write", 1, self._tend, TEND_S)

    @property
    def reads(self) -> bool:
        """Whether it may be asked at present."""
        return not self._num_overdue and self._reading.allows(time.monotonic())

    @property
    def writes(self) -> bool:
        return self._writing.allows(time.monotonic())

    @property
    def num_awaited(self) -> int:
        """Blocks that it was asked for and has not brought."""
        with self._lock:
            return sum(len(piece.blocks) for piece in self._pieces)

    def num_ready(self, hashes: Sequence[BlockHash]) -> int:
        """How many, from the first on, it has written itself. From memory."""
        with self._lock:
            return self.tier.num_ready(hashes, 0, len(hashes)) if self.reads else 0

    def holds(self, block_hash: BlockHash) -> bool:
        """Whether it has written that block, and may be asked for it. From memory."""
        return bool(self.num_ready([block_hash]))

    def keeps(self, block_hash: BlockHash) -> bool:
        """Whether its own has it, or will have."""
        with self._lock:
            return bool(self.tier.num_kept([block_hash], 0, 1))

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            self.tier.touch(hashes, len(hashes))

    def ask(self, hashes: Sequence[BlockHash], answer: Callable[[list[bool]], None]) -> None:
        """Tell which it has, others' included. While one answer is long overdue no more are
        awaited, so that not ever more of them wait for a place that hangs: it is none."""
        asked, now_s = object(), time.monotonic()
        with self._lock:
            hangs = now_s - next(iter(self._asked.values()), now_s) > LOAD_S
            if not hangs:
                self._asked[asked] = now_s
        if hangs:
            answer([False] * len(hashes))
            return

        def ask() -> None:
            there = [False] * len(hashes)
            try:
                there = self._found(hashes)
            except Exception as error:  # noqa: BLE001 - whatever a store does, it is a miss
                self._failed(self._reading, f"asking failed: {error}")
            with self._lock:
                del self._asked[asked]
            answer(there)

        self.readers.put(ask)

    def read(self, load: Load, blocks: list[int], then: Callable[[list[int]], None]) -> None:
        """Bring blocks of a load, by their place in it, and go on with those that it did not."""
        piece = Piece(load, blocks)
        with self._lock:
            self._pieces[piece] = None
        self.readers.put(partial(self._read, piece, then))

    def give_up(self, load: Load) -> None:
        """A load waits no more. While a piece of it is out, the place is not asked."""
        with self._lock:
            late = [piece for piece in self._pieces if piece.load is load]
            for piece in late:
                del self._pieces[piece]
                self._num_overdue += 1
                self.stats.count_lost("late", len(piece.blocks))
            if late:
                self._reading.failed(
                    time.monotonic(), f"{self.store.name}: a read came too late, given up"
                )

    def stage(self, keys: Sequence[RecordKey], sources: Sequence[memoryview]) -> int:
        """Copy blocks and have them written; returns how many, from the first on, there was room
        for. Sources are free again when it returns."""
        num_staged = 0
        while num_staged < len(keys):
            batch = keys[num_staged : num_staged + self.cell_blocks]
            slots = self._take(len(batch))
            batch = batch[: len(slots)]
            if not batch:
                break
            try:
                for slot, key, source in zip(slots, batch, sources[num_staged:], strict=False):
                    record = self._record(slot)
                    payload = np.frombuffer(record, np.uint8)[HEADER_BYTES:]
                    payload[:] = np.frombuffer(source, np.uint8)  # without the GIL
                    seal(record, key)
            except Exception:  # such as a source of another length
                self._free.extend(slots)
                raise
            self.writer.put(partial(self._write, slots, batch))
            num_staged += len(batch)
        with self._lock:
            self.stats.num_dropped_blocks += len(keys) - num_staged
        return num_staged

    def clear(self) -> None:
        """On the writing thread. Give up all of its own."""
        with self._lock:
            dropped = self.tier.clear()
        self._delete(dropped)

    def close(self) -> None:
        """On the writing thread, its last call."""
        try:
            self.store.close()
        except Exception as error:  # noqa: BLE001 - nothing more can be done for it
            log.warning("%s: closing failed: %s", self.store.name, error)

    def _read(self, piece: Piece, then: Callable[[list[int]], None]) -> None:
        begin_s = time.monotonic()
        load, lost = piece.load, {}
        try:
            if not load.given_up:
                lost = self._bring(load, piece.blocks)
        except Exception as error:  # noqa: BLE001 - whatever a store does, it is a miss
            self._failed(self._reading, f"reading failed: {error}")
            lost = {at: "failed" for at in piece.blocks if load.lost[at] is not None}
        for at, reason in lost.items():
            load.lose([at], reason)
        with self._lock:
            if piece not in self._pieces:  # nobody waits for it any more
                self._num_overdue -= 1
                return
            del self._pieces[piece]
            self.stats.read_s.add(time.monotonic() - begin_s)
            self.stats.num_loaded_blocks += len(piece.blocks) - len(lost)
            for reason in lost.values():
                self.stats.count_lost(reason, 1)
            if len(lost) < len(piece.blocks):
                self._reading.succeeded()
        then(list(lost))

    def _bring(self, load: Load, blocks: list[int]) -> dict[int, str]:
        """Why blocks of a load, by their place in it, did not come; the others did."""
        keys = [load.keys[at] for at in blocks]
        lost = {}
        damaged: list[BlockHash] = []
        damage = ""
        for at, key, loan in zip(blocks, keys, self._fetch(keys), strict=True):
            why = why_lost(loan, key)
            if loan is None and self.store.contains([key.block_hash])[0]:
                why = "damaged", f"block {key.block_hash.hex()}: it cannot be read"
            if why is not None:
                lost[at], what = why
                if lost[at] == "damaged":
                    damage = what
                    damaged.append(key.block_hash)
            elif loan is not None and not load.take(at, loan.record[HEADER_BYTES:], loan.kept):
                lost[at] = "missing"
        self._forget([load.keys[at].block_hash for at in lost], damaged)
        if damage:
            log.warning("%s: of %d lost, %s", self.store.name, len(lost), damage)
        return lost

    def _fetch(self, keys: Sequence[RecordKey]) -> list[Loan | None]:
        hashes = [key.block_hash for key in keys]
        if self.store.lend is not None:
            return self.store.lend(hashes)
        slots = self._buffer()[: len(hashes)]
        sizes = self.store.get(hashes, slots)
        return [
            Loan(slot[:size]) if size else None for slot, size in zip(slots, sizes, strict=True)
        ]

    def _buffer(self) -> list[memoryview]:
        """The calling thread's, one slot a block."""
        if not hasattr(self._buffers, "slots"):
            pages = memoryview(arena(self.cell_blocks * self.slot_bytes))
            self._buffers.slots = [
                pages[at * self.slot_bytes : (at + 1) * self.slot_bytes]
                for at in range(self.cell_blocks)
            ]
        return list(self._buffers.slots)

    def _forget(self, lost: Sequence[BlockHash], damaged: Sequence[BlockHash]) -> None:
        """What did not come is stored anew. Own records leave the store as well, or those that
        nobody counts would fill it."""
        with self._lock:
            own = [h for h in lost if self.tier.num_kept([h], 0, 1)]
            for block_hash in own:
                self.tier.remove(block_hash)
            self._shunned.update(dict.fromkeys(damaged))
            while len(self._shunned) > _MOST_SHUNNED:
                del self._shunned[next(iter(self._shunned))]
        if own:
            self.writer.put(partial(self._delete, own))

    def _found(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Which it has, those of others too. Asks the store. Raises OSError."""
        there = self.store.contains(hashes)
        with self._lock:
            return [
                found and block_hash not in self._shunned
                for block_hash, found in zip(hashes, there, strict=True)
            ]

    def _failed(self, breaker: Breaker, what: str) -> None:
        with self._lock:
            breaker.failed(time.monotonic(), f"{self.store.name}: {what}")

    def _take(self, num_slots: int) -> list[int]:
        slots: list[int] = []
        while len(slots) < num_slots:
            try:
                slots.append(self._free.popleft())
            except IndexError:
                break
        return slots

    def _record(self, slot: int) -> memoryview:
        start = slot * self.slot_bytes
        return self._staging[start : start + self.record_bytes]

    def _write(self, slots: list[int], keys: Sequence[RecordKey]) -> None:
        """On the writing thread: keep those that it lacks and that have a parent here."""
        begin_s = time.monotonic()
        claimed = list(range(len(keys)))
        try:
            claimed = self._claim(keys)
            records = [self._record(slots[at]) for at in claimed]
            kept = self.store.put([keys[at] for at in claimed], records)
        except Exception as error:  # noqa: BLE001 - whatever a store does, it is not kept
            self._failed(self._writing, f"writing failed: {error}")
            kept = [False] * len(claimed)
        self._free.extend(slots)
        with self._lock:
            for at, ok in zip(claimed, kept, strict=True):
                block_hash = keys[at].block_hash
                if ok:
                    self.tier.stored(block_hash)
                    self._shunned.pop(block_hash, None)
                elif not self.tier.num_ready([block_hash], 0, 1):
                    self.tier.remove(block_hash)
            self.stats.write_s.add(time.monotonic() - begin_s)
            self.stats.num_stored_blocks += sum(kept)
            self.stats.num_dropped_blocks += kept.count(False)
            self.stats.num_bytes = self.store.num_bytes
            if claimed and all(kept):
                self._writing.succeeded()
        if not all(kept):
            self._failed(self._writing, "no room to write")

    def _claim(self, keys: Sequence[RecordKey]) -> list[int]:
        """Which are to be written: not there yet, and below a parent that is."""
        elsewhere = dict.fromkeys(key.parent for key in keys) | dict.fromkeys(
            key.block_hash for key in keys
        )
        hashes = list(elsewhere)
        there = {h for h, found in zip(hashes, self._found(hashes), strict=True) if found}
        claimed: list[int] = []
        dropped: list[BlockHash] = []
        with self._lock:
            self.tier.capacity = self.store.capacity  # where there is no rest to tend it
            for at, key in enumerate(keys):
                own = self.tier.num_kept([key.block_hash], 0, 1)
                if own or key.block_hash in there:
                    continue
                rooted = key.parent == key.root or key.parent in there
                if not rooted and not self.tier.num_kept([key.parent], 0, 1):
                    self.stats.num_dropped_blocks += 1
                    continue
                dropped += self.tier.make_room(protected=key.parent)
                if not self.tier.claim(key.block_hash, key.parent):
                    self.stats.num_dropped_blocks += 1
                    continue
                claimed.append(at)
        if dropped:
            self.store.delete(dropped)
        return claimed

    def _tend(self) -> None:
        """On the writing thread, when there is nothing else to do."""
        try:
            self.store.tend()
            self.stats.num_bytes = self.store.num_bytes
            with self._lock:
                self.tier.capacity = self.store.capacity
                dropped = self.tier.make_room()  # of what it found at the start, too
            if dropped:
                self.store.delete(dropped)
        except Exception as error:  # noqa: BLE001 - as in _write
            self._failed(self._writing, f"tending failed: {error}")

    def _delete(self, hashes: Sequence[BlockHash]) -> None:
        """On the writing thread. What cannot be deleted is never served wrong."""
        try:
            self.store.delete(hashes)
        except Exception as error:  # noqa: BLE001 - as in _write
            self._failed(self._writing, f"deleting failed: {error}")
