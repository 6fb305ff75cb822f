"""`/cache/whatif` and `/cache/worth`: what an engine says its cache is worth, as JSON."""

from collections.abc import Callable, Sequence
from typing import Any

from foreword.core.ghost import Outlook
from foreword.core.worth import Balance, WhatIf, Worth
from foreword.server.tenants import shown

Decode = Callable[[Sequence[int]], str]


def what_if(found: WhatIf) -> dict[str, Any]:
    return {
        "window_s": found.window_s,
        "asked_blocks": found.num_asked,
        "block_tokens": found.block_tokens,
        "sampled_1_in": found.sampled_1_in,
        "load_block_s": dict(zip(found.places, found.load_s, strict=True)),
        "now": _outlook(found.now, found.places),
        "rows": [
            {
                "place": row.place,
                "times": row.times,
                "blocks": row.num_blocks,
                "bytes": row.num_bytes,
                **_outlook(row.outlook, found.places),
            }
            for row in found.rows
        ],
    }


def balance(found: Balance, tenant: str, decode: Decode) -> dict[str, Any]:
    """For one tenant, or all if it is empty. What was sent with a salt of its own shows no text:
    who chose one wants nobody to know what was asked."""
    plain = f"{tenant}:" if tenant else ""

    def document(row: Worth) -> str:
        salt, name = row.owner
        return name if salt == plain else shown(name, "")

    def segment(row: Worth) -> dict[str, Any]:
        text = decode(row.token_ids) if row.owner[0] == plain else None
        return {"start": row.start, "stop": row.stop, "text": text}

    return {
        "window_s": found.window_s,
        "tenants": [_worth(row, tenant, found.places) for row in found.tenants],
        "documents": [
            {"document": document(row), **_worth(row, tenant, found.places)}
            for row in found.documents
        ],
        "segments": [
            {**segment(row), **_worth(row, tenant, found.places)} for row in found.segments
        ],
    }


def _outlook(found: Outlook, places: Sequence[str]) -> dict[str, Any]:
    return {
        "hit_rate": sum(found.hit_rates),
        "by_place": dict(zip(places, found.hit_rates, strict=True)),
        "saved_s_per_day": found.saved_s,
    }


def _worth(row: Worth, tenant: str, places: Sequence[str]) -> dict[str, Any]:
    return {
        "tenant": shown(row.owner[0], tenant),
        "requests": row.num_requests,
        "requests_missed": row.num_missed,
        "tokens_shared": row.shared_prefix_tokens * row.reuse_count,
        "shared_prefix_tokens": row.shared_prefix_tokens,
        "reuse_count": row.reuse_count,
        "prefill_s_per_token": row.prefill_s_per_token,
        "restore_bytes": row.restore_bytes,
        "bytes_per_s": row.bytes_per_s,
        "eviction_penalty_s": row.eviction_penalty_s,
        "saved_s": row.saved_s,
        "worth_it": None if row.saved_s is None else row.saved_s > row.eviction_penalty_s,
        "held_bytes": dict(zip(places, row.held_bytes, strict=True)),
    }
