"""ForewordPolicy: our order of eviction in vLLM's CPU tier, by configuration alone.

    "kv_connector_extra_config": {
        "eviction_policy": "ForewordPolicy",
        "cache_policy_module_path": "foreword.plugins.vllm"}

vLLM keeps the bytes and counts their readers; here is only which chunk leaves first, and that is
`core.tier.Tier`'s to say. Interface: vllm/v1/kv_offload/cpu/policies/base.py of vLLM 0.32. It runs
in vLLM's scheduler, so nothing here may wait, and little may take time.
"""

from collections.abc import Callable, Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from foreword.core.block import BlockHash
from foreword.core.policy import LRU
from foreword.core.tier import Tier
from foreword.plugins.vllm.lineage import GROUP_BYTES, Lineage


class ForewordPolicy(CachePolicy):
    """Leaf first, the least recently used of them; a parent counts as used when a child was."""

    def __init__(self, cache_capacity: int) -> None:
        """`cache_capacity`: chunks of vLLM's CPU tier."""
        super().__init__(cache_capacity)
        self._tier = Tier(cache_capacity, policy=LRU)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._parents: dict[OffloadKey, BlockHash] = {}  # of chunks that are to be inserted

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None
    ) -> None:
        """vLLM 0.33 passes the context here, too; on_store_miss had it already."""
        parent = self._parents.pop(key, None) or BlockHash(key[-GROUP_BYTES:])
        if key in self._chunks:
            self._tier.touch((key,), 1)
        else:
            claimed = self._tier.claim(key, parent)
            assert claimed, "more chunks than vLLM's CPU tier has room for"
        self._chunks[key] = chunk

    def remove(self, key: OffloadKey) -> None:
        """A store failed. Chunks after this one stay: they can be reached when it is stored again,
        which the next request that misses it does."""
        if self._chunks.pop(key, None) is not None:
            self._tier.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        last = {key[-GROUP_BYTES:]: key for key in keys if key in self._chunks}
        for key in last.values():
            self._tier.touch((key,), 1)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Comes before the room for `keys` is made; `evict` and `insert` have no context. Not
        again when the request offers the same keys again, so they stay until it ends."""
        lineage = Lineage.of(req_context)
        for key in keys:
            end = req_context.get_offload_key_position(key)
            self._parents[key] = BlockHash(lineage.parent(key, end) or key[-GROUP_BYTES:])

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        for keys in key_groups:
            self._tier.touch(keys, len(keys))
            if self._parents:  # what vLLM had no room for
                for key in keys:
                    self._parents.pop(key, None)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """A load begins. vLLM tells of uses when a request ends, which is late: its stores would
        find the end of what it has just loaded as old as before, and their parent gone."""
        self._tier.touch((key,), 1)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """None, too, when only what the new chunks come after could leave: the front of a prompt
        that is longer than the tier stays."""
        taken = self._tier.take(n, self._held(protected))
        if taken is None:
            return None
        return [(key, self._chunks.pop(key)) for key in taken]

    def clear(self) -> None:
        self._tier.clear()
        self._chunks.clear()
        self._parents.clear()

    def _held(self, protected: set[OffloadKey]) -> Callable[[OffloadKey], bool]:
        """Chunks that are read or written, those `protected`, and what these come after."""
        parents = self._parents
        before = {parents[key] for key in protected if key in parents}
        chunks = self._chunks
        return lambda key: chunks[key].ref_cnt != 0 or key in protected or key in before
