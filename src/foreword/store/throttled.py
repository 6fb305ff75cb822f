"""ThrottledStore: a store that is as slow as asked, for benches and tests of what waits for it."""

import threading
import time
from collections.abc import Sequence

from foreword.core.block import BlockHash
from foreword.core.cost import TierCost
from foreword.store.front import Front
from foreword.store.store import KVStore


class ThrottledStore(Front):
    """Each call of `get` takes at least what `cost` says, and the bytes of those that run at once
    go one after another. It lends nothing. `cost` may be changed."""

    lend = None

    def __init__(self, store: KVStore, cost: TierCost) -> None:
        super().__init__(store)
        self.cost = cost
        self._lock = threading.Lock()
        self._free_s = 0.0  # when its bytes of before are through

    def get(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> list[int]:
        begin_s = time.monotonic()
        lengths = self._store.get(hashes, buffers)
        with self._lock:
            start_s = max(self._free_s, begin_s)
            self._free_s = start_s + sum(lengths) / self.cost.bytes_per_s
            end_s = self._free_s + self.cost.latency_s
        time.sleep(max(0.0, end_s - time.monotonic()))
        return lengths
