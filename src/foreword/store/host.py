"""HostStore: records in one arena of this machine's memory, in slots of one size."""

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from foreword.core.block import BlockHash
from foreword.store.codec import RecordKey
from foreword.store.pages import arena, whole_pages
from foreword.store.store import Entry, Loan


class HostStore:
    """At most `num_bytes` of memory, touched only as it fills. A record has at most `record_bytes`;
    a slot is that, rounded up to pages. Raises ValueError where not one fits."""

    name = "host"
    shared = has_others = False

    def __init__(self, num_bytes: int, record_bytes: int) -> None:
        self.slot_bytes = whole_pages(record_bytes)
        self.capacity = num_bytes // self.slot_bytes
        if self.capacity < 1:
            raise ValueError(
                f"{num_bytes} bytes of host memory hold no block: one takes {self.slot_bytes}"
            )
        pages = arena(self.capacity * self.slot_bytes)
        self._arena = np.frombuffer(pages, np.uint8).reshape(self.capacity, self.slot_bytes)
        self._lock = threading.Lock()  # of what follows; never held while bytes are copied
        # Each record's slot and its bytes there: a new tuple with each put, so that a reader can
        # tell whether the record that it copied was still the one kept when it was done.
        self._kept: dict[BlockHash, tuple[int, NDArray[np.uint8]]] = {}
        self._free: list[int] = []
        self._num_touched = 0

    @property
    def num_bytes(self) -> int:
        """Memory touched since the start: it goes back to the system at `close`."""
        return self._num_touched * self.slot_bytes

    def entries(self) -> Iterable[Entry]:
        return ()

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return [block_hash in self._kept for block_hash in hashes]

    def get(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> list[int]:
        return [self._read(*wanted) for wanted in zip(hashes, buffers, strict=True)]

    def lend(self, hashes: Sequence[BlockHash]) -> list[Loan | None]:
        return [self._lend(block_hash) for block_hash in hashes]

    def put(self, keys: Sequence[RecordKey], records: Sequence[memoryview]) -> list[bool]:
        return [
            self._write(key.block_hash, record) for key, record in zip(keys, records, strict=True)
        ]

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            for block_hash in hashes:
                self._forget(block_hash)

    def tend(self) -> None:
        pass

    def close(self) -> None:
        """Forget everything. The memory goes when the last reader is done with it."""
        with self._lock:
            self._kept.clear()
            self._free.clear()
            self._arena = np.empty((0, self.slot_bytes), np.uint8)
            self.capacity = self._num_touched = 0

    def _read(self, block_hash: BlockHash, buffer: memoryview) -> int:
        loan = self._lend(block_hash)
        if loan is None:
            return 0
        record = np.frombuffer(loan.record, np.uint8)
        # Without the GIL, and as fast as memmove.
        np.frombuffer(buffer, np.uint8)[: len(record)] = record
        return len(record) if loan.kept() else 0

    def _lend(self, block_hash: BlockHash) -> Loan | None:
        kept = self._kept.get(block_hash)
        if kept is None:
            return None
        # A slot is only written after its record was forgotten.
        return Loan(kept[1].data.toreadonly(), lambda: self._kept.get(block_hash) is kept)

    def _write(self, block_hash: BlockHash, record: memoryview) -> bool:
        with self._lock:
            self._forget(block_hash)
            if self._free:
                slot = self._free.pop()
            elif self._num_touched < self.capacity:
                slot = self._num_touched
                self._num_touched += 1
            else:
                return False
            target = self._arena[slot, : len(record)]
        target[:] = np.frombuffer(record, np.uint8)
        with self._lock:
            self._forget(block_hash)  # that another thread has put meanwhile
            self._kept[block_hash] = slot, target
        return True

    def _forget(self, block_hash: BlockHash) -> None:
        kept = self._kept.pop(block_hash, None)
        if kept is not None:
            self._free.append(kept[0])
