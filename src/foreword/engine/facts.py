"""What an engine says of itself: to who starts it, and in the first line of a request log."""

from collections.abc import Mapping, Sequence
from typing import Any

from foreword.core.cache import KVCache
from foreword.core.request import ModelCard
from foreword.core.stats import TierStats
from foreword.engine.model import LoadedModel
from foreword.engine.settings import EngineSettings


def banner(
    card: ModelCard,
    settings: EngineSettings,
    model: LoadedModel,
    cache: KVCache,
    exactness: tuple[bool, str],
    tiers: Mapping[str, str],
) -> dict[str, str]:
    """For people, in order; exactness as `Runner` and tiers as they say it themselves."""
    num_blocks, block_size = cache.pool.num_blocks, cache.block_size
    size = num_blocks * model.block_bytes(block_size) / (1 << 20)
    weights = {"weights": model.quantised.description} if model.quantised else {}
    return {
        "model": f"{card.name}, {settings.dtype} on {settings.device}",
        **weights,
        "context": f"{card.max_model_len:,} tokens",
        "KV pool": f"{num_blocks * block_size:,} tokens, {size:,.0f} MiB",
        "reuse": f"on: evict {settings.evict}, store {settings.store}, order {settings.order}"
        if settings.prefix_caching
        else "off",
        **tiers,
        "exact": f"{'yes' if exactness[0] else 'no'}: {exactness[1]}",
    }


def for_replay(
    name: str,
    settings: EngineSettings,
    cache: KVCache,
    block_bytes: int,
    tiers: Sequence[TierStats],
) -> dict[str, Any]:
    """What decides which tokens a server of the model `name` reuses, apart from its requests."""
    return {
        "model": name,
        "block_size": cache.block_size,
        "block_bytes": block_bytes,
        "blocks": cache.pool.num_blocks,
        "tiers": [
            {
                "name": stats.name,
                "blocks": tier.capacity,
                "shared": tier.shared,
                "found": tier.num_blocks,
            }
            for stats, tier in zip(tiers, cache.lower.tiers, strict=True)
        ],
        "max_num_seqs": settings.max_num_seqs,
        "max_batch_tokens": settings.max_batch_tokens,
        "max_prefill_tokens": settings.max_prefill_tokens,
        "reuse": settings.prefix_caching,
        "evict": settings.evict,
        "store": settings.store,
    }
