"""Front: what stands before a store and changes some of what it does."""

from collections.abc import Callable, Iterable, Sequence

from foreword.core.block import BlockHash
from foreword.store.codec import RecordKey
from foreword.store.store import Entry, KVStore, Loan


class Front:
    """A KVStore that does all as `store` does it."""

    def __init__(self, store: KVStore) -> None:
        self._store = store

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def shared(self) -> bool:
        return self._store.shared

    @property
    def has_others(self) -> bool:
        return self._store.has_others

    @property
    def capacity(self) -> int:
        return self._store.capacity

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    @property
    def lend(self) -> Callable[[Sequence[BlockHash]], list[Loan | None]] | None:
        return self._store.lend

    def entries(self) -> Iterable[Entry]:
        return self._store.entries()

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return self._store.contains(hashes)

    def get(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> list[int]:
        return self._store.get(hashes, buffers)

    def put(self, keys: Sequence[RecordKey], records: Sequence[memoryview]) -> list[bool]:
        return self._store.put(keys, records)

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        self._store.delete(hashes)

    def tend(self) -> None:
        self._store.tend()

    def close(self) -> None:
        self._store.close()
