"""FaultyStore: a store that fails on purpose, for tests and `foreword verify --store`."""

import errno
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from random import Random

from foreword.core.block import BlockHash
from foreword.store.codec import RecordKey
from foreword.store.front import Front
from foreword.store.pages import PAGE_BYTES, arena, whole_pages
from foreword.store.store import KVStore, Loan


class Fault(StrEnum):
    """One way in which a place that keeps bytes fails."""

    FLIP = "bit flip"  # one bit of what is read is another
    SWAP = "swapped record"  # another block's whole record is read
    TRUNCATE = "truncation"  # the read ends early
    TEAR = "torn write"  # zeros from some page on
    STALE = "stale record"  # under the key lie the bytes of the record that was put before
    LOSE = "loss"  # of a write that was said to be done
    DELAY = "delay"
    HANG = "hang"  # until released
    ERROR = "error"  # OSError
    FULL = "full disk"
    CRASH = "crash"  # in the middle of a put


class FaultyStore(Front):
    """Stands before `store` and lets `fault` befall records, or calls where it is no record's, with
    probability `rate`. The same seed and the same calls give the same faults. A delay takes
    `delay_s` seconds; after a crash each call raises OSError."""

    def __init__(
        self, store: KVStore, fault: Fault, seed: int = 0, rate: float = 1.0, delay_s: float = 0.01
    ) -> None:
        super().__init__(store)
        self._fault = fault
        self._draw = Random(f"{fault} {seed}")
        self._rate = rate
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._crashed = False
        self._known: dict[BlockHash, None] = {}
        self._last_put: memoryview | None = None
        self.num_faults = 0

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        self._befall()
        return self._store.contains(hashes)

    def get(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> list[int]:
        self._befall()
        lengths = self._store.get(hashes, buffers)
        if self._fault not in (Fault.FLIP, Fault.SWAP, Fault.TRUNCATE):
            return lengths
        return [
            self._damage(*read) if read[2] and self._strikes() else read[2]
            for read in zip(hashes, buffers, lengths, strict=True)
        ]

    @property
    def lend(self) -> Callable[[Sequence[BlockHash]], list[Loan | None]] | None:
        return self._lend if self._store.lend is not None else None

    def put(self, keys: Sequence[RecordKey], records: Sequence[memoryview]) -> list[bool]:
        self._befall()
        return [self._put(*pair) for pair in zip(keys, records, strict=True)]

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        self._befall()
        self._store.delete(hashes)

    def tend(self) -> None:
        self._befall()
        self._store.tend()

    def close(self) -> None:
        self.release()
        self._store.close()

    def release(self) -> None:
        """Let what hangs go on, and hang no more."""
        self._released.set()

    def _lend(self, hashes: Sequence[BlockHash]) -> list[Loan | None]:
        """What is lent is a copy where damage befalls it: the store's own bytes stay right."""
        assert self._store.lend is not None
        self._befall()
        loans = self._store.lend(hashes)
        if self._fault not in (Fault.FLIP, Fault.SWAP, Fault.TRUNCATE):
            return loans
        for at, (block_hash, loan) in enumerate(zip(hashes, loans, strict=True)):
            if loan is not None and self._strikes():
                copy = _copied(loan.record, len(loan.record))
                length = self._damage(block_hash, copy, len(copy))
                loans[at] = replace(loan, record=copy[:length])
        return loans

    def _strikes(self) -> bool:
        with self._lock:
            strikes = self._draw.random() < self._rate
            self.num_faults += strikes
            return strikes

    def _befall(self) -> None:
        """What happens to whole calls."""
        if self._crashed:
            raise OSError(errno.EIO, "it crashed before")
        if self._fault is Fault.DELAY and self._strikes():
            self._released.wait(self._delay_s)
        elif self._fault is Fault.HANG and not self._released.is_set() and self._strikes():
            self._released.wait()
        elif self._fault is Fault.ERROR and self._strikes():
            raise OSError(errno.EIO, "an injected error")

    def _damage(self, block_hash: BlockHash, buffer: memoryview, length: int) -> int:
        """Spoil what was read; its length now."""
        if self._fault is Fault.SWAP:
            others = [other for other in self._known if other != block_hash]
            return self._store.get([self._draw.choice(others)], [buffer])[0] if others else 0
        if self._fault is Fault.TRUNCATE:
            end = self._draw.randrange(length)
            buffer[end:length] = bytes(length - end)
            return end
        bit = self._draw.randrange(8 * length)
        buffer[bit // 8] ^= 1 << bit % 8
        return length

    def _put(self, key: RecordKey, record: memoryview) -> bool:
        older = self._last_put
        if self._fault is Fault.STALE:
            self._last_put = _copied(record, len(record))
        self._known[key.block_hash] = None
        on_put = (Fault.TEAR, Fault.STALE, Fault.LOSE, Fault.FULL, Fault.CRASH)
        if self._fault not in on_put or not self._strikes():
            return self._store.put([key], [record])[0]
        if self._fault in (Fault.LOSE, Fault.FULL):
            self._store.delete([key.block_hash])
            return self._fault is Fault.LOSE
        if self._fault is Fault.STALE:
            return self._store.put([key], [older or record])[0]
        num_pages = self._draw.randrange(-(-len(record) // PAGE_BYTES))
        kept = self._store.put([key], [_copied(record, num_pages * PAGE_BYTES)])[0]
        if self._fault is Fault.CRASH:
            self._crashed = True
            raise OSError(errno.EIO, "an injected crash")
        return kept


def _copied(record: memoryview, num_bytes: int) -> memoryview:
    """The first bytes of a record and then zeros, from the start of a page on."""
    copy = memoryview(arena(whole_pages(len(record))))
    copy[:num_bytes] = record[:num_bytes]
    return copy[: len(record)]
