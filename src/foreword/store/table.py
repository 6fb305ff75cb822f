"""The table of one part of the disk store: which block lies in which slot.

Format of `part-X.table` (golden bytes in tests/unit/test_disk.py; integers little-endian):

       0    8  magic "FOREPART"
       8    2  format version, 1
      16    8  slot_bytes of `part-X.slots`, where slot i starts at i * slot_bytes
      24    8  generation: how many rows have been changed so far
      64 4032  the slots of the latest 1,008 changes, 4 bytes each; change i at place i % 1008
    4096       one row of 128 bytes per slot:
               0   32  block hash
              32   32  parent's block hash; the root for a first block
              64   32  root
              96    4  position: blocks before it
             100    4  record length in bytes
             104    8  checksum: XXH3-64 of the row up to here, seeded with the slot's number
             112    8  last used, in nanoseconds since 1970; not under the checksum, since a torn
                       value only disturbs an order
             120    8  zero

A row of zeros is a free slot, and so is one whose checksum does not agree. The seed makes a row
that was written to another slot's place a bad one.
"""

import os
import struct
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from foreword.core.block import BlockHash
from foreword.store.codec import RecordKey

MAGIC = b"FOREPART"
VERSION = 1
TABLE_HEADER_BYTES = 4096
ROW_BYTES = 128
_SUPER = struct.Struct("<8sH6xQQ")
_SEALED = struct.Struct("<32s32s32sII")
_REST = struct.Struct("<QQ8x")
_GENERATION = struct.Struct("<Q")
_GENERATION_AT = 24
_RECENT_AT = 64
NUM_RECENT = (TABLE_HEADER_BYTES - _RECENT_AT) // 4
ROW = np.dtype(
    [
        ("block_hash", "V32"),
        ("parent", "V32"),
        ("root", "V32"),
        ("position", "<u4"),
        ("length", "<u4"),
        ("checksum", "<u8"),
        ("last_used", "<u8"),
        ("zero", "<u8"),
    ]
)
_SEALED_WORDS = (_SEALED.size + 8) // 8  # in words of 8 bytes, with the checksum

Rows = NDArray[np.void]
Slots = NDArray[np.int64]


def new_header(slot_bytes: int) -> bytes:
    """What a table without rows consists of."""
    header = _SUPER.pack(MAGIC, VERSION, slot_bytes, 0)
    return header + bytes(TABLE_HEADER_BYTES - len(header))


def slot_bytes_of(header: bytes) -> int:
    """Slot size of the part with this table header; 0 where it is none that this version reads."""
    if len(header) < TABLE_HEADER_BYTES:
        return 0
    magic, version, slot_bytes, _ = _SUPER.unpack(header[: _SUPER.size])
    return int(slot_bytes) if (magic, version) == (MAGIC, VERSION) else 0


def pack_row(key: RecordKey, length: int, slot: int, last_used: int) -> bytes:
    """The row of a record of `length` bytes that lies in `slot`."""
    sealed = _SEALED.pack(key.block_hash, key.parent, key.root, key.position, length)
    return sealed + _REST.pack(xxh3_64_intdigest(sealed, seed=slot), last_used)


def moved_row(row: bytes, slot: int) -> bytes:
    """The same record's row after it was copied to `slot`."""
    sealed = row[: _SEALED.size]
    last_used = _REST.unpack(row[_SEALED.size :])[1]
    return sealed + _REST.pack(xxh3_64_intdigest(sealed, seed=slot), last_used)


def runs(slots: Slots, longest: int = sys.maxsize) -> Iterator[slice]:
    """Cut a list of slots where the next one is no neighbour, and after `longest`."""
    cuts = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    for start, end in pairwise([0, *cuts, len(slots)]):
        for first in range(start, end, longest):
            yield slice(first, min(end, first + longest))


def hashes_of(rows: Rows, field: str = "block_hash") -> list[BlockHash]:
    """What rows have as block hash, parent or root, in their order."""
    raw = rows[field].tobytes()
    return [BlockHash(raw[start : start + 32]) for start in range(0, len(raw), 32)]


class Table:
    """A part's rows as this process last read or wrote them. `slot_of` may be read by any thread;
    one thread at a time may call the methods that write. `rows` never gets shorter."""

    def __init__(self, fd: int) -> None:
        """`fd` stays its caller's."""
        self._fd = fd
        self._generation = -1
        self._recent = np.zeros(NUM_RECENT, "<u4")
        self.rows: Rows = np.zeros(0, ROW)
        self.slot_of: dict[BlockHash, int] = {}

    def refresh(self) -> None:
        """Read what its writer changed since the last call: the rows that it announced, or after
        more of them than it remembers, all."""
        generation = self._read_generation()
        if generation == self._generation:
            return
        self._lengthen((os.fstat(self._fd).st_size - TABLE_HEADER_BYTES) // ROW_BYTES)
        slots = self._announced(generation)
        if slots is None:
            slots, rows = self._all_changed()
        else:
            rows = self.read_rows(slots)
        self.apply(slots, rows)
        self._generation = generation

    def apply(self, slots: Slots, rows: Rows) -> None:
        """Take in these rows, as they were read."""
        numbers = slots.tolist()
        if self.slot_of:
            for slot, old in zip(numbers, hashes_of(self.rows[slots]), strict=True):
                if self.slot_of.get(old) == slot:
                    del self.slot_of[old]
        raw = rows.tobytes()
        good = np.zeros(len(rows), np.bool_)
        sums = rows["checksum"].tolist()
        for index, (slot, checksum) in enumerate(zip(numbers, sums, strict=True)):
            sealed = raw[index * ROW_BYTES : index * ROW_BYTES + _SEALED.size]
            if xxh3_64_intdigest(sealed, seed=slot) != checksum:
                continue
            good[index] = True
            # A record that is being moved lies in two slots: the lower one will stay.
            block_hash = BlockHash(sealed[:32])
            if slot < self.slot_of.get(block_hash, slot + 1):
                self.slot_of[block_hash] = slot
        rows = rows.copy()
        rows[~good] = np.zeros((), ROW)
        self.rows[slots] = rows

    def read_rows(self, slots: Slots) -> Rows:
        """As they are on disk now; zero after the table's end. The slots ascend."""
        rows = np.zeros(len(slots), ROW)
        for run in runs(slots):
            place = TABLE_HEADER_BYTES + int(slots[run.start]) * ROW_BYTES
            raw = os.pread(self._fd, (run.stop - run.start) * ROW_BYTES, place)
            found = np.frombuffer(raw[: len(raw) // ROW_BYTES * ROW_BYTES], ROW)
            rows[run.start : run.start + len(found)] = found
        return rows

    def same(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of these rows still say on disk what they said when they were read."""
        return ~_differ(self.read_rows(slots), self.rows[slots])

    def resize(self, num_rows: int) -> None:
        """Make room for this many rows, or give back that of rows which are free."""
        self._lengthen(num_rows)
        os.ftruncate(self._fd, TABLE_HEADER_BYTES + num_rows * ROW_BYTES)

    def write(self, slots: Slots, raw: bytes) -> None:
        """Put rows on disk for ascending slots. Raises OSError, with any of them written."""
        for run in runs(slots):
            chunk = raw[run.start * ROW_BYTES : run.stop * ROW_BYTES]
            place = TABLE_HEADER_BYTES + int(slots[run.start]) * ROW_BYTES
            if os.pwrite(self._fd, chunk, place) != len(chunk):
                raise OSError("a table row was written in part")

    def announce(self, slots: Sequence[int] | Slots) -> None:
        """Tell readers that these rows are others now. Raises OSError, and they learn it later."""
        self._generation += len(slots)
        latest = slots[-NUM_RECENT:]
        for number, slot in enumerate(latest, self._generation - len(latest)):
            self._recent[number % NUM_RECENT] = slot
        # In this order: who sees the generation sees the places that it counts.
        os.pwrite(self._fd, self._recent.tobytes(), _RECENT_AT)
        os.pwrite(self._fd, _GENERATION.pack(self._generation), _GENERATION_AT)

    def announce_all(self) -> None:
        """Tell readers that any row may be another now."""
        self.announce([0] * (NUM_RECENT + 1))

    def _read_generation(self) -> int:
        raw = os.pread(self._fd, _GENERATION.size, _GENERATION_AT)
        return int(_GENERATION.unpack(raw)[0]) if len(raw) == _GENERATION.size else 0

    def _announced(self, generation: int) -> Slots | None:
        """Slots changed since our generation, ascending; None where that is not known."""
        raw = os.pread(self._fd, NUM_RECENT * 4, _RECENT_AT)
        # Its writer may have gone on while we read: what it overwrote is not known.
        newest = self._read_generation()
        if self._generation < 0 or not 0 <= newest - self._generation <= NUM_RECENT:
            return None
        if generation < self._generation or len(raw) != NUM_RECENT * 4:
            return None
        places = np.arange(self._generation, generation) % NUM_RECENT
        recent = np.frombuffer(raw, "<u4")[places].tolist()
        slots = np.array(sorted(set(recent)), np.int64)  # np.unique first imports half of numpy
        return slots if not len(slots) or slots[-1] < len(self.rows) else None

    def _all_changed(self) -> tuple[Slots, Rows]:
        found = self.read_rows(np.arange(len(self.rows)))
        slots = np.flatnonzero(_differ(found, self.rows))
        return slots, found[slots]

    def _lengthen(self, num_rows: int) -> None:
        if num_rows > len(self.rows):
            rows = np.zeros(num_rows, ROW)
            rows[: len(self.rows)] = self.rows
            self.rows = rows


def _differ(one: Rows, other: Rows) -> NDArray[np.bool_]:
    """Row by row, without last_used."""
    words: Any = one.view("<u8").reshape(-1, ROW_BYTES // 8)[:, :_SEALED_WORDS]
    others: Any = other.view("<u8").reshape(-1, ROW_BYTES // 8)[:, :_SEALED_WORDS]
    differ: NDArray[np.bool_] = (words != others).any(axis=1)
    return differ
