"""ThrottledStore: a store that is as slow as asked, for benches and tests of what waits for it."""

import threading
import time
from collections.abc import Iterable, Sequence

from foreword.core.block import BlockHash
from foreword.core.cost import TierCost
from foreword.store.codec import RecordKey
from foreword.store.store import Entry, KVStore


class ThrottledStore:
    """Stands before `store`; each call of `get` takes at least what `cost` says, and the bytes of
    those that run at once go one after another. It lends nothing. `cost` may be changed."""

    shared = False
    has_others = False
    lend = None

    def __init__(self, store: KVStore, cost: TierCost) -> None:
        self._store = store
        self.cost = cost
        self._lock = threading.Lock()
        self._free_s = 0.0  # when its bytes of before are through

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def capacity(self) -> int:
        return self._store.capacity

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    def entries(self) -> Iterable[Entry]:
        return self._store.entries()

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return self._store.contains(hashes)

    def get(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> list[int]:
        begin_s = time.monotonic()
        lengths = self._store.get(hashes, buffers)
        with self._lock:
            start_s = max(self._free_s, begin_s)
            self._free_s = start_s + sum(lengths) / self.cost.bytes_per_s
            end_s = self._free_s + self.cost.latency_s
        time.sleep(max(0.0, end_s - time.monotonic()))
        return lengths

    def put(self, keys: Sequence[RecordKey], records: Sequence[memoryview]) -> list[bool]:
        return self._store.put(keys, records)

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        self._store.delete(hashes)

    def tend(self) -> None:
        self._store.tend()

    def close(self) -> None:
        self._store.close()
