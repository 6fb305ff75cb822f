"""ForewordStorage: our stores below SGLang's host pools (HiCache's L3), by configuration alone.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "foreword",
      "module_path": "foreword.plugins.sglang", "class_name": "ForewordStorage",
      "interface_v1": 1, "hicache_storage_pass_prefix_keys": true}'

Interface: sglang/srt/mem_cache/hicache_storage.py of SGLang 0.5.23. SGLang's prefetch and backup
threads call it, its scheduler only `get_stats`, `clear` and the calls around the start and end.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_context, get_serving

from foreword.core.stats import TierStats
from foreword.plugins.outer import Block, Budgets, OuterCache
from foreword.plugins.sglang.metrics import Shown
from foreword.plugins.sglang.model import Served, identify
from foreword.plugins.sglang.pages import Pages
from foreword.store.patience import PROBE_S

log = logging.getLogger("foreword.plugins")

_CLOSE_S = 10.0  # for what waits to be written
_SETTINGS = {"host_bytes", "disk_bytes", "disk_folder"}
_NOT_OURS = {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
_NOT_OURS |= {"hicache_storage_pass_prefix_keys", "prefetch_threshold", "tp_lcm_size"}
_NOT_OURS |= {"prefetch_timeout_base", "prefetch_timeout_per_ki_token"}


class ForewordStorage(HiCacheStorage):
    """Pages by SGLang's own keys, in a store of their own for each of its host pools. What is
    missing, damaged, late or in a failing place is a miss."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        """Settings of ours in the extra config: `disk_bytes`, `disk_folder` and `host_bytes` (by
        process, for its KV pool; default 0: SGLang has host memory of its own above)."""
        del kwargs  # SGLang 0.5.23 has none to give
        extra = storage_config.extra_config or {}
        self._config = storage_config
        self._budgets = _budgets(extra)
        self._served = Served.by(storage_config)
        self._pages: dict[str, Pages] = {}
        self._weight_version = _weight_version()
        # Which weights there were when a thread first stored.
        self._first_seen: WeakKeyDictionary[threading.Thread, Any] = WeakKeyDictionary()
        self._shown = Shown()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any = None,
    ) -> torch.Tensor | None:
        """The page, in `target_location` where one is given; None where it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        kv = self._of(PoolName.KV)
        if kv is None:
            return [None] * len(keys)
        targets = target_locations or [None] * len(keys)
        pages = [kv.empty() if target is None else target for target in targets]
        if not all(_fits(page, kv) for page in pages):
            return [None] * len(keys)
        there = kv.read(_wanted(keys), pages)
        return [page if found else None for page, found in zip(pages, there, strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Whether it will be written, or is there already."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        kv = self._to_fill(PoolName.KV)
        pages = [page for page in values or () if page is not None and kv and _fits(page, kv)]
        if kv is None or len(pages) != len(keys):
            return False
        return all(kv.write(_following(keys, None), pages))

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]))

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many, from the first on. Waits a twentieth of a second for others' at most."""
        kv = self._of(PoolName.KV)
        return kv.num_found(_wanted(keys)) if kv else 0

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Into slots of the KV pool, a page's worth for each key."""
        kv = self._of(PoolName.KV)
        if kv is None:
            return [False] * len(keys)
        return kv.load(_wanted(keys), host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Out of slots of the KV pool."""
        kv = self._to_fill(PoolName.KV)
        if kv is None:
            return [False] * len(keys)
        return kv.store(_following(keys, _prefix(extra_info)), host_indices)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that all pools can restore, each pool's own, and every length that
        can be. A pool of block groups (not kept by us) has no say and gets no verdict."""
        num_pages = self.batch_exists(keys, extra_info)
        found = {str(PoolName.KV): num_pages} if num_pages else {}
        restorable = set(range(1, num_pages + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or not restorable:
                continue
            there = self._there(transfer.name, keys[:num_pages])
            window = 0
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
            lengths = _restorable(there, window)
            if lengths:
                found[str(transfer.name)] = max(lengths)
            restorable &= lengths
        return PoolTransferResult(max(restorable, default=0), found, sorted(restorable))

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        moved = {}
        for transfer in transfers:
            keys = transfer.keys or []
            pages = self._of(transfer.name)
            loaded = pages.load(_wanted(keys), transfer.host_indices) if pages else []
            moved[transfer.name] = loaded or [False] * len(keys)
        return moved

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Where only the last pages of a prefix are kept, the first of these has no parent."""
        moved = {}
        for transfer in transfers:
            keys = transfer.keys or []
            pages = self._to_fill(transfer.name)
            trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            blocks = _following(keys, None if trailing else _prefix(extra_info))
            stored = pages.store(blocks, transfer.host_indices) if pages else []
            moved[transfer.name] = stored or [False] * len(keys)
        return moved

    def clear(self) -> None:
        """Drop what this process has stored, and find nothing from before, of others neither. What
        is stored from now on is for this process only."""
        for pages in self._pages.values():
            pages.cache.renew()
            pages.cache.clear()

    @property
    def tiers(self) -> dict[str, tuple[TierStats, ...]]:
        """What each pool's tiers did, by the pool's name."""
        return {name: pages.cache.stats for name, pages in self._pages.items()}

    def get_stats(self) -> StorageMetrics:
        """What was moved since the last call, as SGLang's own collector takes it; our own counters
        go the same way to its `/metrics`."""
        self._shown.show(self.tiers)
        metrics = StorageMetrics()
        for pages in self._pages.values():
            for what, num_pages, speed in pages.transfers():
                getattr(metrics, f"{what}_pgs").append(num_pages)
                getattr(metrics, f"{what}_bandwidth").append(speed)
        return metrics

    def close(self) -> None:
        """Write what waits, for ten seconds at most, and close the stores."""
        for pages in self._pages.values():
            pages.cache.close(_CLOSE_S)
        self._pages.clear()

    def _register(self, name: str, pool: Any) -> None:
        """A pool that cannot give a page flat is left out: it is a miss."""
        known = self._pages.get(str(name))
        if known is not None and known.pool is pool:
            return
        try:
            sample = pool.get_dummy_flat_data_page()
        except NotImplementedError as error:
            log.warning("pool %s is not kept: %s", name, error)
            return
        if known is not None:
            known.cache.close(_CLOSE_S)
        identity = identify(self._served, self._config, name, pool)
        budgets = self._budgets
        if name != PoolName.KV:
            budgets = replace(budgets, host_bytes=0)
        cache = OuterCache(identity, sample.nbytes, budgets)
        self._pages[str(name)] = Pages(pool, cache, sample)

    def _of(self, name: str) -> Pages | None:
        """A pool's pages. Those that other weights have made are found no more."""
        version = _weight_version()
        if version != self._weight_version:
            self._weight_version = version
            for pages in self._pages.values():
                pages.cache.renew()
        return self._pages.get(str(name))

    def _to_fill(self, name: str) -> Pages | None:
        """The same, to store pages. Not for a thread that has stored before the weights changed:
        what it is given may be of those, until SGLang flushes its caches, which ends its threads
        and begins others."""
        pages = self._of(name)
        first = self._first_seen.setdefault(threading.current_thread(), self._weight_version)
        return pages if first == self._weight_version else None

    def _there(self, name: str, keys: list[str]) -> list[bool]:
        """Which of a side pool's pages there are."""
        side = self._of(name)
        if side is None:
            return [False] * len(keys)
        blocks = _wanted(keys)
        try:
            there = side.cache.probe(blocks).result(PROBE_S)
        except TimeoutError:
            there = [side.cache.num_ready([block]) == 1 for block in blocks]
        side.cache.touch([block for block, found in zip(blocks, there, strict=True) if found])
        return there


def _budgets(extra: dict[str, Any]) -> Budgets:
    """Raises ValueError for what cannot be a budget."""
    if unknown := extra.keys() - _SETTINGS - _NOT_OURS:
        log.warning("unknown in the extra config: %s", ", ".join(sorted(unknown)))
    given = {name: extra[name] for name in _SETTINGS if name in extra}
    if "disk_folder" in given:
        given["disk_folder"] = Path(given["disk_folder"]).expanduser()
    return Budgets(**given)


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
    return extra_info.prefix_keys if extra_info else None


def _weight_version() -> Any:
    """What the weights are called that SGLang has at present; it can be told others at run time."""
    served = get_context().is_config_namespace_published("serving")
    return get_serving().weight_version if served else None


def _wanted(keys: Sequence[str]) -> list[Block]:
    """Pages to be looked for or loaded. What comes before them is not known: SGLang 0.5.23 leaves
    out the last node's keys of a prefix that it prefetches below."""
    return [Block(key.encode()) for key in keys]


def _following(keys: Sequence[str], prefix: list[str] | None) -> list[Block]:
    """Pages to be stored: `keys` follow one another, and `prefix`, all that comes before them;
    None: that is not known, and the first of them can leave before what it follows."""
    before = prefix or []
    parents = [before[-1] if before else None, *keys]
    return [
        Block(key.encode(), parent.encode() if parent else None, len(before) + at)
        for at, (key, parent) in enumerate(zip(keys, parents, strict=False))
    ]


def _fits(page: torch.Tensor, kv: Pages) -> bool:
    return page.is_contiguous() and page.device.type == "cpu" and page.nbytes == kv.page_bytes


def _restorable(there: Sequence[bool], window: int) -> set[int]:
    """Prefix lengths that a pool can restore: all of their pages are there, or, with a window,
    the last ones."""
    lengths = set()
    num_run = 0  # pages in a row that are there, up to the last one looked at
    for length, found in enumerate(there, 1):
        num_run = num_run + 1 if found else 0
        if num_run >= min(window or length, length):
            lengths.add(length)
    return lengths
