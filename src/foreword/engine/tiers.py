"""The cache that the settings ask for, and the tiers below the device."""

import logging
from collections.abc import Sequence

from foreword.core.cache import KVCache
from foreword.core.cost import Costs, TierCost, TierFit
from foreword.core.identity import Identity
from foreword.core.place import PLACEMENTS
from foreword.core.policies import POLICIES
from foreword.core.policy import Policy
from foreword.core.tier import Tier
from foreword.engine.settings import BLOCK_SIZE, EngineSettings
from foreword.engine.staging import CELL_BYTES
from foreword.store.codec import record_bytes
from foreword.store.disk import DiskStore
from foreword.store.host import HostStore
from foreword.store.sharers import leave_identity
from foreword.store.store import KVStore

log = logging.getLogger("foreword.engine")

# Rather slow ones: a few reads say more.
EXPECTED = {"host": TierCost(0.0002, 4e9), "disk": TierCost(0.001, 1e9)}


def open_stores(settings: EngineSettings, kv_bytes: int, identity: Identity) -> list[KVStore]:
    """The stores of blocks of so many bytes, the fastest first. A folder that cannot be used costs
    its tier, not the server."""
    stores: list[KVStore] = []
    if not settings.prefix_caching:
        return stores
    size = record_bytes(identity.block_size, kv_bytes)
    if settings.host_bytes:
        stores.append(HostStore(settings.host_bytes, size))
    if settings.disk_bytes:
        try:
            settings.disk_folder.mkdir(parents=True, exist_ok=True)
            leave_identity(settings.disk_folder, identity)  # first: it takes room too
            stores.append(DiskStore(settings.disk_folder, settings.disk_bytes, size))
        except OSError as error:
            log.warning("KV is not kept on disk, in %s: %s", settings.disk_folder, error)
    for store in stores:
        if not store.capacity:
            log.warning("there is no room in the %s tier: a block takes more", store.name)
    return stores


def open_cache(
    settings: EngineSettings, num_blocks: int, stores: Sequence[KVStore], costs: Costs
) -> KVCache:
    """The core, ruled by the policies that the settings name."""
    policy = POLICIES[settings.evict]
    cache = KVCache(
        num_blocks,
        BLOCK_SIZE,
        reuse=settings.prefix_caching,
        tiers=[tier_of(store, policy) for store in stores],
        policy=policy,
        placement=PLACEMENTS[settings.store],
    )
    cache.restores.costs = cache.lower.placement.costs = costs
    return cache


def costs_of(stores: Sequence[KVStore], kv_bytes: int, settings: EngineSettings) -> Costs:
    """What is expected of the stores before anything is measured. Of the steps nothing is known."""
    size = record_bytes(BLOCK_SIZE, kv_bytes)
    fits = [fit_of(EXPECTED[store.name], size) for store in stores]
    return Costs(BLOCK_SIZE, size, settings.max_prefill_tokens, fits)


def fit_of(cost: TierCost, record_size: int) -> TierFit:
    """What a tier of records of so many bytes is expected to cost, to learn from its reads."""
    return TierFit(cost, max(1, CELL_BYTES // record_size) * record_size)


def tier_of(store: KVStore, policy: Policy) -> Tier:
    """The core's view of a store, with what was found in it."""
    tier = Tier(store.capacity, shared=store.has_others, policy=policy)
    tier.restore((entry.block_hash, entry.parent) for entry in store.entries())
    return tier
