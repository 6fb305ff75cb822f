"""Sealed records with KV that their key decides, and disk stores to put them in."""

import mmap
from collections.abc import Sequence
from pathlib import Path

from foreword.core.block import BlockHash, Chain, token_key
from foreword.store.codec import RecordKey, check, kv_offset, seal
from foreword.store.disk import DiskStore

BLOCK_SIZE = 4
ROOT = BlockHash(b"\x11" * 32)
RECORD_BYTES = 5000  # one whole page and a rest
SLOT_BYTES = 8192
MIB = 1 << 20


def keys_of(name: int, count: int) -> list[RecordKey]:
    """The chain called `name`."""
    tokens = [name, *range(1, count * BLOCK_SIZE)]
    hashes = Chain(ROOT, BLOCK_SIZE, tokens).hashes
    return [
        RecordKey(
            ROOT,
            hashes[at - 1] if at else ROOT,
            hashes[at],
            at,
            token_key(tokens[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]),
        )
        for at in range(count)
    ]


def hashes_of(keys: Sequence[RecordKey]) -> list[BlockHash]:
    return [key.block_hash for key in keys]


def buffers(count: int) -> list[memoryview]:
    arena = memoryview(mmap.mmap(-1, max(1, count) * SLOT_BYTES))
    return [arena[at * SLOT_BYTES : (at + 1) * SLOT_BYTES] for at in range(count)]


def sealed(keys: Sequence[RecordKey], num_bytes: int = RECORD_BYTES) -> list[memoryview]:
    records = [buffer[:num_bytes] for buffer in buffers(len(keys))]
    for key, record in zip(keys, records, strict=True):
        kv_bytes = num_bytes - kv_offset(BLOCK_SIZE)
        record[kv_offset(BLOCK_SIZE) :] = (key.block_hash * (kv_bytes // 32 + 1))[:kv_bytes]
        seal(record, key)
    return records


def put(store: DiskStore, keys: Sequence[RecordKey]) -> list[bool]:
    return store.put(keys, sealed(keys))


def readable(store: DiskStore, keys: Sequence[RecordKey]) -> list[bool]:
    """Which come back whole; what comes back is always right."""
    into = buffers(len(keys))
    lengths = store.get(hashes_of(keys), into)
    for key, buffer, length in zip(keys, into, lengths, strict=True):
        if length:
            check(buffer[:length], key)
    return [length == RECORD_BYTES for length in lengths]


def taken(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (folder, *folder.iterdir()))


def found(store: DiskStore) -> list[BlockHash]:
    return [entry.block_hash for entry in store.entries()]


class QuickStore(DiskStore):
    """Sees at once who comes and goes."""

    recount_s = grace_s = 0.0

    @property
    def capacity(self) -> int:
        with self._folder.locked(0) as held:
            if held:
                self._recount()
        return super().capacity


class Stores:
    """Opens stores on one folder and closes them in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[DiskStore] = []

    def __call__(self, budget: int = MIB, record_bytes: int = RECORD_BYTES) -> DiskStore:
        store = QuickStore(self.folder, budget, record_bytes)
        self.opened.append(store)
        return store

    def table(self, store: DiskStore) -> Path:
        return self.folder / f"{store.part}.table"

    def close(self, store: DiskStore) -> None:
        self.opened.remove(store)
        store.close()
