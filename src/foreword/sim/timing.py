"""What a replay in virtual time found, as plain values for JSON and for people.

Seconds are virtual. Shares run from 0 to 1.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from foreword.sim.fleet import FleetRules, Timing
from foreword.sim.journey import Journey
from foreword.sim.percentile import percentile
from foreword.sim.shape import WorkerShape
from foreword.sim.trace import Trace
from foreword.sim.worker import WorkerCount

_CDF_POINTS = 50


def summary(timing: Timing, trace: Trace, shape: WorkerShape, rules: FleetRules) -> dict[str, Any]:
    """All figures of a replay."""
    journeys = timing.journeys
    result: dict[str, Any] = {
        "requests": len(journeys),
        "refused_requests": timing.num_refused,
        "left_requests": timing.num_left,
        "requests_after_answers": timing.num_after,
        "seconds": timing.end_s,
        **hits(journeys, shape),
        "ttft_s": spread(j.first_token_s - j.sent_s for j in journeys),
        "queue_s": spread(j.admitted_s - j.sent_s for j in journeys),
    }
    if trace.id_tokens == 1:
        result["answer_s"] = spread(j.ended_s - j.sent_s for j in journeys)
    result["workers"] = [
        _worker(number, count, timing, shape) for number, count in enumerate(timing.workers)
    ]
    if logged := observed(trace, journeys):
        result["logged"] = logged
    result["notes"] = [*_notes(timing, trace, rules), *trace.notes]
    return result


def hits(journeys: Iterable[Journey], shape: WorkerShape) -> dict[str, Any]:
    """Prompt tokens, the share of them that was reused, and of them from each tier."""
    found = list(journeys)
    num_tokens = sum(j.num_tokens for j in found)
    below = [sum(j.restored.get(at, 0) for j in found) for at in range(len(shape.tiers))]
    tokens = {"device": sum(j.num_hit_tokens for j in found) - sum(below)}
    tokens |= {room.name: num for room, num in zip(shape.tiers, below, strict=True)}
    return {
        "prompt_tokens": num_tokens,
        "hit_tokens": sum(tokens.values()),
        "hit_share": sum(tokens.values()) / num_tokens if num_tokens else 0.0,
        "hit_tokens_by_tier": tokens,
    }


def observed(trace: Trace, journeys: Iterable[Journey]) -> dict[str, Any]:
    """What the trace itself says of the same requests, as far as it does."""
    places = {journey.place for journey in journeys}
    records = [record for record in trace if record.place in places]
    found: dict[str, Any] = {}
    cached = [r for r in records if r.num_cached_tokens is not None]
    if cached:
        num_hits = sum(record.num_cached_tokens or 0 for record in cached)
        found["hit_tokens"] = num_hits
        found["hit_share"] = num_hits / sum(record.num_tokens for record in cached)
    ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
    if ttfts:
        found["ttft_s"] = spread(ttfts)
    return found


def spread(values: Iterable[float]) -> dict[str, Any]:
    """How values are distributed; zeros where there are none."""
    ordered = sorted(values)
    if not ordered:
        return {"mean": 0.0, "median": 0.0, "p90": 0.0, "p99": 0.0, "cdf": []}
    shares = [point / _CDF_POINTS for point in range(1, _CDF_POINTS + 1)]
    return {
        "mean": sum(ordered) / len(ordered),
        "median": percentile(ordered, 0.5),
        "p90": percentile(ordered, 0.9),
        "p99": percentile(ordered, 0.99),
        "cdf": [[percentile(ordered, share), share] for share in shares],
    }


def _worker(number: int, count: WorkerCount, timing: Timing, shape: WorkerShape) -> dict[str, Any]:
    own = [journey for journey in timing.journeys if journey.worker == number]
    return {
        "requests": count.num_requests,
        "hit_share": hits(own, shape)["hit_share"],
        "busy_share": count.busy_s / timing.end_s if timing.end_s else 0.0,
        "steps": count.num_steps,
        "prefilled_tokens": count.num_prefilled_tokens,
        "decoded_tokens": count.num_decoded_tokens,
        "most_waiting": count.most_waiting,
        "preemptions": count.num_preemptions,
        "evicted_blocks": count.num_evicted_blocks,
        "tiers": {
            room.name: {
                "loaded_bytes": tier.num_loaded_blocks * shape.block_bytes,
                "stored_bytes": tier.num_stored_blocks * shape.block_bytes,
                "dropped_blocks": tier.num_dropped_blocks,
            }
            for room, tier in zip(shape.tiers, count.tiers, strict=True)
        },
    }


def _notes(timing: Timing, trace: Trace, rules: FleetRules) -> Iterator[str]:
    if trace.id_tokens > 1:
        yield (
            f"the trace has ids of blocks of {trace.id_tokens} tokens: prefill alone is simulated, "
            "in whole blocks; a request ends with its prompt, and its answer leaves no KV"
        )
    if timing.num_after:
        yield (
            f"{timing.num_after:,} requests came as long after the answer before them as in the "
            "log, not when it says"
        )
    if rules.warmup:
        yield f"the first {int(len(trace) * rules.warmup):,} requests count for the workers alone"
    if any(count.tiers for count in timing.workers):
        yield "no load is late or damaged, and no write waits: a replay moves no bytes"
