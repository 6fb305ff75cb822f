"""Parts: what one writer keeps in the disk store's folder, a table and a file of slots.

Who writes a part holds a lock on its table, which the system drops when the process ends in any
way. Everybody reads all parts, without a lock: a row says the same before and after its slot was
read, or what was read is not used.

A record is written to a free slot, then its row; a row is zeroed, then its slot is free. So no
crash leaves a row that speaks of other bytes, and nothing needs to be flushed: what a power loss
tears, checksums find.
"""

import errno
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreword.core.block import BlockHash
from foreword.store.codec import RecordKey
from foreword.store.pages import PAGE_BYTES, arena
from foreword.store.table import (
    ROW_BYTES,
    TABLE_HEADER_BYTES,
    Slots,
    Table,
    hashes_of,
    moved_row,
    pack_row,
    runs,
    slot_bytes_of,
)

_REQUEST_BYTES = 64 << 20  # Far above where larger requests stop being faster.
_MOST_VECTORS = 1024  # What the system takes in one call.
_DIRECT = getattr(os, "O_DIRECT", 0)

Wanted = Sequence[tuple[BlockHash, memoryview]]


def table_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.table"


def slots_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.slots"


def lock_table(path: Path) -> int | None:
    """An open descriptor that holds the part's lock, for reading and writing; None where somebody
    else has it or this process may not."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def read_slot_bytes(table_fd: int) -> int:
    """Slot size of a part; 0 where this version cannot read it."""
    return slot_bytes_of(os.pread(table_fd, TABLE_HEADER_BYTES, 0))


def open_slots(path: Path, flags: int) -> int:
    """Past the page cache, where the file system can do that, and not through a link. Raises
    OSError."""
    flags |= os.O_NOFOLLOW
    try:
        return os.open(path, flags | _DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


class Part:
    """A part to read from. Any thread may call `get`; `close` waits for nobody."""

    def __init__(self, table_fd: int, slots_fd: int, slot_bytes: int) -> None:
        """Takes over the descriptors: they are closed with the part, or with the last reference
        to it, so that no reader finds another file under their numbers."""
        self.table = Table(table_fd)
        self.slot_bytes = slot_bytes
        self._slots_fd = slots_fd
        self._longest = max(1, min(_MOST_VECTORS // 2, _REQUEST_BYTES // slot_bytes))
        self.close = weakref.finalize(self, _close, table_fd, slots_fd)
        self.inode = os.fstat(table_fd).st_ino

    def get(self, wanted: Wanted) -> list[int]:
        """Read records into buffers of one slot each; how many bytes, 0 where it is not here.
        Raises OSError."""
        lengths = [0] * len(wanted)
        slot_of = self.table.slot_of
        found = sorted(
            (slot, index)
            for index, (block_hash, _) in enumerate(wanted)
            if (slot := slot_of.get(block_hash)) is not None
        )
        slots = np.array([slot for slot, _ in found], np.int64)
        for run in runs(slots, self._longest):
            picks = [index for _, index in found[run]]
            stored = self.table.rows["length"][slots[run]].tolist()
            buffers = [wanted[index][1] for index in picks]
            start = int(slots[run.start]) * self.slot_bytes
            num_read = os.preadv(self._slots_fd, buffers, start)
            kept = self._still_there(slots[run], [wanted[index][0] for index in picks])
            for place, (index, length, keep) in enumerate(zip(picks, stored, kept, strict=True)):
                if keep and place * self.slot_bytes + length <= num_read:
                    lengths[index] = length
        return lengths

    def _still_there(self, slots: Slots, hashes: Sequence[BlockHash]) -> list[bool]:
        """Whether these slots held these records while they were read."""
        same: list[bool] = self.table.same(slots).tolist()
        return same


class OwnPart(Part):
    """The part that this process writes: one thread at a time, while others may `get`."""

    def __init__(self, table_fd: int, slots_fd: int, slot_bytes: int) -> None:
        """The table is locked already."""
        super().__init__(table_fd, slots_fd, slot_bytes)
        self._table_fd = table_fd
        self._rows_lock = threading.Lock()
        self._uses_lock = threading.Lock()
        self._used: dict[BlockHash, int] = {}  # when, in ns: not in the table yet
        self._free: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._not_zeroed: set[int] = set()
        self._pages = memoryview(arena(self._longest * PAGE_BYTES))
        self._moving = memoryview(arena(slot_bytes))
        self.num_slots = os.fstat(slots_fd).st_size // slot_bytes

    def load(self, outside: Callable[[BlockHash], bool]) -> None:
        """Find the records that a writer before us left; `outside` knows those in other parts.
        What cannot be used goes: past the file's end, twice here, or without its parent."""
        self.table.refresh()
        self.table.resize(max(len(self.table.rows), self.num_slots))
        rows, slot_of = self.table.rows, self.table.slot_of
        for block_hash in [key for key, slot in slot_of.items() if slot >= self.num_slots]:
            del slot_of[block_hash]
        slots = np.fromiter(slot_of.values(), np.int64, len(slot_of))
        slots = slots[np.argsort(rows["position"][slots], kind="stable")]
        hashes, parents, roots = (
            hashes_of(rows[slots], field) for field in ("block_hash", "parent", "root")
        )
        chain: set[BlockHash] = set()
        for block_hash, parent, root in zip(hashes, parents, roots, strict=True):
            if parent == root or parent in chain or outside(parent):
                chain.add(block_hash)
            else:
                del slot_of[block_hash]
        self._free = np.ones(self.num_slots, np.bool_)
        self._free[np.fromiter(slot_of.values(), np.int64, len(slot_of))] = False
        idle = np.ones(len(rows), np.bool_)
        idle[: self.num_slots] = self._free
        self._zero(np.flatnonzero(idle & (rows["length"] > 0)))
        self.table.resize(self.num_slots)
        self.table.announce_all()

    def by_last_use(self) -> Slots:
        """Slots of all records, least recently used first; of one batch, parents first."""
        slots = np.array(list(self.table.slot_of.values()), np.int64)
        rows = self.table.rows[slots]
        order: Slots = slots[np.lexsort((rows["position"], rows["last_used"]))]
        return order

    @property
    def is_removed(self) -> bool:
        """Whether somebody deleted one of the files, which are ours to use and no longer there."""
        return any(not os.fstat(fd).st_nlink for fd in (self._table_fd, self._slots_fd))

    @property
    def num_bytes(self) -> int:
        """What both files take of the disk."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in (self._table_fd, self._slots_fd))

    def plan(self, num_records: int, limit: int) -> list[range]:
        """Free slots below `limit` for up to so many records: neighbours, low ones first."""
        free = np.flatnonzero(self._free[:limit])
        planned: list[range] = []
        width = self._longest
        while num_records and len(free):
            width = min(width, num_records, len(free))
            starts = np.flatnonzero(free[width - 1 :] - free[: len(free) - width + 1] == width - 1)
            if not len(starts):
                width //= 2
                continue
            at = int(starts[0])
            planned.append(range(int(free[at]), int(free[at]) + width))
            free = np.delete(free, slice(at, at + width))
            num_records -= width
        return planned

    def put(self, slots: range, keys: Sequence[RecordKey], records: Sequence[memoryview]) -> None:
        """Write records to these free slots. Raises OSError, and then they all stay free."""
        self._write(slots.start, records)
        now = time.time_ns()
        rows = [
            pack_row(key, len(record), slot, now)
            for slot, key, record in zip(slots, keys, records, strict=True)
        ]
        self._enter(np.arange(slots.start, slots.stop), b"".join(rows))

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        """Forget records; those that are not here are no error. Raises OSError when the disk
        fails: then they are gone, and their slots are not used before that is on disk too."""
        slot_of = self.table.slot_of
        found = [slot for key in hashes if (slot := slot_of.pop(key, None)) is not None]
        self._zero(np.array(sorted({*found, *self._not_zeroed}), np.int64))

    def used(self, hashes: Sequence[BlockHash]) -> None:
        """These records were used now, by any thread. The next `note_uses` writes it down."""
        with self._uses_lock:
            self._used.update(dict.fromkeys(hashes, time.time_ns()))

    def note_uses(self) -> None:
        """Put in the table what was used. Only the order of a later start depends on it."""
        with self._uses_lock:
            used, self._used = self._used, {}
        with self._rows_lock:
            slot_of = self.table.slot_of
            when = {slot_of[key]: at for key, at in used.items() if key in slot_of}
            slots = np.array(sorted(when), np.int64)
            self.table.rows["last_used"][slots] = [when[slot] for slot in slots.tolist()]
            with suppress(OSError):
                self.table.write(slots, self.table.rows[slots].tobytes())

    def grow(self, num_slots: int) -> None:
        """Make the file this long; it takes room as slots are written. Raises OSError."""
        with self._rows_lock:
            self.table.resize(num_slots)
        os.ftruncate(self._slots_fd, num_slots * self.slot_bytes)
        self._free = np.concatenate([self._free, np.ones(num_slots - self.num_slots, np.bool_)])
        self.num_slots = num_slots

    def shrink(self, limit: int, most: int, step: int) -> None:
        """Come closer to `limit` slots: move up to `most` records down, then cut off what is free
        if that is all or at least `step` slots. Raises OSError."""
        free = np.flatnonzero(self._free[:limit])
        tail = sorted((slot for slot in self.table.slot_of.values() if slot >= limit), reverse=True)
        for source, target in zip(tail[:most], free[:most].tolist(), strict=False):
            self._move(source, target)
        taken = np.flatnonzero(~self._free)
        end = max(limit, int(taken[-1]) + 1 if len(taken) else 0)
        if end < self.num_slots and (end == limit or self.num_slots - end >= step):
            os.ftruncate(self._slots_fd, end * self.slot_bytes)
            self.num_slots = end
            self._free = self._free[:end]
            with self._rows_lock:
                self.table.resize(end)

    def release(self) -> None:
        """Let others write this part."""
        if self.close.alive:
            self.note_uses()
            with suppress(OSError):
                os.utime(self._table_fd)  # so that it counts as left now
                fcntl.flock(self._table_fd, fcntl.LOCK_UN)
        self.close()

    def _still_there(self, slots: Slots, hashes: Sequence[BlockHash]) -> list[bool]:
        # A slot leaves this dict before anything else is written to it.
        slot_of = self.table.slot_of
        return [slot_of.get(key) == slot for key, slot in zip(hashes, slots.tolist(), strict=True)]

    def _write(self, slot: int, records: Sequence[memoryview]) -> None:
        """Records of one length to neighbouring slots, in one request. What a record has beyond
        whole pages is copied to a page of ours: direct I/O takes nothing shorter."""
        size = len(records[0])
        whole = size // PAGE_BYTES * PAGE_BYTES
        vectors: list[memoryview] = []
        for index, record in enumerate(records):
            if whole:
                vectors.append(record[:whole])
            if whole < size:
                page = self._pages[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
                page[: size - whole] = record[whole:]
                vectors.append(page)
        num_bytes = len(records) * self.slot_bytes
        if os.pwritev(self._slots_fd, vectors, slot * self.slot_bytes) != num_bytes:
            raise OSError(errno.ENOSPC, "records were written in part")

    def _enter(self, slots: Slots, raw: bytes) -> None:
        try:
            with self._rows_lock:
                self.table.write(slots, raw)
                self.table.apply(slots, np.frombuffer(raw, self.table.rows.dtype))
                self._free[slots] = False
        except OSError:
            # Some of the rows may be on disk: their slots must not be written.
            self._free[slots] = False
            self._zero(slots)
            raise
        with suppress(OSError):
            self.table.announce(slots)

    def _zero(self, slots: Slots) -> None:
        """Make slots free: no longer in the dict, they get their rows zeroed."""
        if not len(slots):
            return
        self._not_zeroed.update(slots.tolist())
        with self._rows_lock:
            self.table.rows[slots] = np.zeros((), self.table.rows.dtype)
            self.table.write(slots, bytes(len(slots) * ROW_BYTES))
        self._not_zeroed.difference_update(slots.tolist())
        self._free[slots[slots < self.num_slots]] = True
        with suppress(OSError):
            self.table.announce(slots)

    def _move(self, source: int, target: int) -> None:
        row = self.table.rows[source].tobytes()
        num_read = os.preadv(self._slots_fd, [self._moving], source * self.slot_bytes)
        if num_read != self.slot_bytes:
            raise OSError(errno.EIO, "a record could not be read")
        self._write(target, [self._moving])
        # While both rows are there the lower slot counts; what is left of a crash in between is
        # cleaned at the next start.
        self._enter(np.array([target]), moved_row(row, target))
        self._zero(np.array([source]))
