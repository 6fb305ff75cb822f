"""What an engine says of itself: to who starts it, and in the first line of a request log."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from foreword.core.cache import KVCache
from foreword.core.request import ModelCard
from foreword.core.stats import TierStats
from foreword.engine.model import LoadedModel
from foreword.engine.settings import EngineSettings

log = logging.getLogger("foreword.engine")


def card_of(model: LoadedModel, settings: EngineSettings, num_tokens: int) -> ModelCard:
    """What clients are told is what fits the KV memory of `num_tokens` tokens: a request never
    needs more than the whole pool."""
    if num_tokens < model.max_model_len:
        log.warning("the KV memory holds no more than %d tokens", num_tokens)
    return ModelCard(
        settings.served_name or model.name,
        min(model.max_model_len, num_tokens),
        model.vocab_size,
        model.tool_style,
    )


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
