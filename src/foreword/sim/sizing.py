"""What traffic asks of a deployment: which size of which tier pays, how many replicas it takes, and
the time to the first token.

A tier holds all that those above it hold, so what a cache of its size reuses comes from it or from
above. Sizes are of all replicas together, as if each request found the replica that knows most.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foreword.sim.percentile import percentile
from foreword.sim.plan import Deployment, Figure, PlannedTier, Row, Table
from foreword.sim.traffic import Traffic

ENOUGH = 0.95  # of what a tier's best size gains
BUSY = 0.7  # of its time a replica may be at work: beyond that queues grow quickly
SEQUENCES_MAX = 256  # that a replica decodes at once


@dataclass(frozen=True, slots=True)
class Source:
    """A place and how many of each prompt's first tokens are known, there or in faster ones."""

    tier: PlannedTier | None  # None: the device
    known: Sequence[int]


@dataclass(frozen=True, slots=True)
class Size:
    """What a tier should hold, in tokens; `table`: what each size gains over the tiers above."""

    tier: PlannedTier
    num_tokens: int
    table: Table


def first_token_s(
    site: Deployment, num_tokens: int, known: Sequence[tuple[PlannedTier | None, int]]
) -> float:
    """Seconds of a request, alone on its replica, until its first token: it takes as much from the
    tiers as makes it quickest, the rest is computed. `known`: places, the fastest first, and how
    many tokens are known down to each."""
    at_hand, loaded_s = 0, 0.0
    best_s = site.step.prefill_s(num_tokens)
    for tier, down_to in known:
        reused = min(down_to, num_tokens - 1)  # the last token is always computed
        if reused > at_hand:
            loaded_s += site.load_s(tier, reused - at_hand) if tier else 0.0
            at_hand = reused
            best_s = min(best_s, loaded_s + site.step.prefill_s(num_tokens - at_hand, at_hand))
    return best_s


def first_tokens_s(site: Deployment, traffic: Traffic, sources: Sequence[Source]) -> list[float]:
    """`first_token_s` of each request."""
    return [
        first_token_s(site, num_tokens, [(one.tier, one.known[at]) for one in sources])
        for at, num_tokens in enumerate(traffic.num_tokens)
    ]


def prefills_s(site: Deployment, traffic: Traffic, known: Sequence[int]) -> list[float]:
    """Seconds that the device works on each prompt. What is at hand takes none."""
    return first_tokens_s(site, traffic, [Source(None, known)])


def curve_table(site: Deployment, traffic: Traffic) -> Table:
    """Hit rate by size, and what each step saves."""
    nothing_s = sum(prefills_s(site, traffic, traffic.known(0)))
    rows: list[Row] = []
    last_bytes = last_s = 0.0
    for tokens, hits in traffic.hits.items():
        num_bytes = tokens * site.kv_bytes
        saved_s = nothing_s - sum(prefills_s(site, traffic, hits))
        rows.append(
            {
                "bytes": num_bytes,
                "tokens": tokens,
                "hit_share": traffic.share(hits),
                "saved_share": saved_s / nothing_s,
                "saved_s_per_gb": (saved_s - last_s) / (num_bytes - last_bytes) * 1e9,
            }
        )
        last_bytes, last_s = num_bytes, saved_s
    return Table(
        "hit rate by size",
        rows,
        {
            "hit_share": "prompt tokens reused ÷ prompt tokens; LRU, one request after another",
            "saved_share": "1 - prefill seconds of what is left ÷ those of all",
            "saved_s_per_gb": "seconds more than in the row above ÷ GB more",
        },
    )


def sizes_of(site: Deployment, traffic: Traffic, device_tokens: float) -> list[Size]:
    """For each tier, the fastest first, the smallest size that gains ENOUGH of what its best size
    does over the tiers above; 0 where loading from it never pays."""
    above = [Source(None, traffic.known(device_tokens))]
    least_tokens, found = device_tokens, []
    for tier in site.tiers:
        most_tokens = tier.num_bytes / site.kv_bytes if tier.num_bytes else math.inf
        without_s = sum(first_tokens_s(site, traffic, above))
        gains = {
            tokens: without_s - sum(first_tokens_s(site, traffic, [*above, Source(tier, hits)]))
            for tokens, hits in traffic.hits.items()
            if least_tokens < tokens <= most_tokens
        }
        best_s = max(gains.values(), default=0.0)
        chosen = min((tokens for tokens in gains if gains[tokens] >= ENOUGH * best_s), default=0)
        if best_s <= 1e-9 * without_s:
            chosen = 0
        found.append(Size(tier, chosen, _size_table(site, traffic, tier, gains)))
        if chosen:
            above.append(Source(tier, traffic.known(chosen)))
            least_tokens = chosen
    return found


def _size_table(
    site: Deployment, traffic: Traffic, tier: PlannedTier, gains: dict[int, float]
) -> Table:
    rows: list[Row] = []
    last_gb = last_s = 0.0
    for tokens, saved_s in gains.items():
        gb = tokens * site.kv_bytes / 1e9
        per_gb = (saved_s - last_s) / (gb - last_gb)
        rows.append(
            {
                "bytes": tokens * site.kv_bytes,
                "hit_share": traffic.share(traffic.known(tokens)),
                "saved_s": saved_s,
                "saved_s_per_gb": per_gb,
                "saved_s_per_price": per_gb / tier.per_gb if tier.per_gb else None,
            }
        )
        last_gb, last_s = gb, saved_s
    return Table(
        f"size of {tier.name}",
        rows,
        {
            "saved_s": "seconds to first tokens, of all requests, less than with the tiers above",
            "saved_s_per_gb": "seconds more than in the row above ÷ GB more",
            "saved_s_per_price": "saved_s_per_gb ÷ price of a GB",
        },
    )


def decode_s(site: Deployment, traffic: Traffic) -> tuple[float, dict[str, float]]:
    """Seconds of a replica for the answer of a request on average, and what they are made of. A
    step reads the weights once and the KV of every sequence; as many decode at once as there is
    room for."""
    output = statistics.fmean(traffic.num_output_tokens)
    context = statistics.fmean(traffic.num_tokens) + output
    sequences = max(1.0, min(SEQUENCES_MAX, site.device_tokens / context))
    bandwidth = site.devices_per_replica * site.hardware.hbm_bytes_per_s
    kv_bytes = sequences * context * site.kv_bytes * site.copies
    step_s = (site.weights_bytes + kv_bytes) / bandwidth
    return output * step_s / sequences, {
        "output": output,
        "decode step": step_s,
        "sequences": sequences,
    }


def replicas_figure(
    site: Deployment, traffic: Traffic, way: str, prefill_s: Sequence[float]
) -> Figure:
    """How many replicas serve the traffic at its rate, before rounding up."""
    _, inputs = decode_s(site, traffic)
    mean_s = statistics.fmean(prefill_s)
    inputs |= {"requests per second": traffic.rate, "prefill": mean_s, "busy": BUSY}
    answer_s = inputs["output"] * inputs["decode step"] / inputs["sequences"]
    return Figure(
        f"replicas, {way}",
        traffic.rate * (mean_s + answer_s) / BUSY,
        "",
        "requests per second × (prefill + output × decode step ÷ sequences) ÷ busy",
        inputs,
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trace asks for."""

    figures: list[Figure]
    tables: list[Table]
    notes: list[str]


def verdict(site: Deployment, traffic: Traffic) -> Verdict:
    """Three ways: nothing kept, the device alone, the device and the tiers as recommended."""
    nothing = traffic.known(0)
    device_tokens = _device_tokens(site, traffic)
    sizes = sizes_of(site, traffic, device_tokens)
    sources = [Source(None, traffic.known(device_tokens))]
    ways = {"nothing kept": [Source(None, nothing)], "device alone": sources}
    chosen = [Source(one.tier, traffic.known(one.num_tokens)) for one in sizes if one.num_tokens]
    if chosen:
        ways["device and " + ", ".join(one.tier.name for one in chosen if one.tier)] = [
            *sources,
            *chosen,
        ]
    figures, rows = [], []
    for way, places in ways.items():
        work_s = prefills_s(site, traffic, places[-1].known)
        replicas = replicas_figure(site, traffic, way, work_s)
        if traffic.rate:
            figures.append(replicas)
        rows.append(_row(site, traffic, way, places, replicas))
    tables = [curve_table(site, traffic), *(one.table for one in sizes if one.table.rows)]
    tables.append(Table("time to the first token", rows, _TTFT))
    figures += [_size_figure(site, one) for one in sizes]
    return Verdict(figures, tables, list(_notes(site, traffic, device_tokens)))


def _size_figure(site: Deployment, size: Size) -> Figure:
    return Figure(
        f"recommended {size.tier.name}",
        size.num_tokens * site.kv_bytes,
        "B",
        "tokens × KV of a token",
        {"tokens": size.num_tokens, "KV of a token": site.kv_bytes},
    )


def _notes(site: Deployment, traffic: Traffic, device_tokens: float) -> Iterator[str]:
    if not traffic.rate:
        yield "the trace has no times, so no rate, no replicas and no queue come of it"
    yield (
        f"the devices of {device_tokens / site.device_tokens:g} replicas are taken to be one cache "
        "of "
        f"{device_tokens:,.0f} tokens, as routing by prefix gives at best; all the traffic ever "
        f"reuses takes {max(traffic.hits):,}"
    )
    yield (
        f"a recommended size is the smallest that saves {ENOUGH:.0%} of what the tier's best size "
        "saves; 0: what is above it has all that pays"
    )


def _device_tokens(site: Deployment, traffic: Traffic) -> float:
    """Of all replicas: of as many as the traffic needs with their devices as its only cache, or
    where it has no rate, of this machine's."""
    if not traffic.rate:
        return site.num_replicas * site.device_tokens

    def suffices(number: int) -> bool:
        known = traffic.known(number * site.device_tokens)
        return replicas_figure(site, traffic, "", prefills_s(site, traffic, known)).value <= number

    most = replicas_figure(site, traffic, "", prefills_s(site, traffic, traffic.known(0))).value
    number = 1 + bisect_left(range(1, math.ceil(most)), True, key=suffices)
    return number * site.device_tokens


def _row(
    site: Deployment, traffic: Traffic, way: str, places: Sequence[Source], replicas: Figure
) -> Row:
    seconds = sorted(first_tokens_s(site, traffic, places))
    row: Row = {
        "way": way,
        "replicas": math.ceil(replicas.value) if traffic.rate else None,
        "hit_share": traffic.share(places[-1].known),
        "mean_s": statistics.fmean(seconds),
        **{f"p{at}_s": percentile(seconds, at / 100) for at in (50, 95, 99)},
        "queued_mean_s": None,
    }
    if traffic.rate:
        work_s = prefills_s(site, traffic, places[-1].known)
        row["queued_mean_s"] = statistics.fmean(seconds) + _wait_s(
            site, traffic, work_s, math.ceil(replicas.value)
        )
    return row


def _wait_s(site: Deployment, traffic: Traffic, work_s: Sequence[float], replicas: int) -> float:
    """The mean wait of a queue with random arrivals (Pollaczek and Khinchine), of a replica that
    decodes beside: its prefills take longer by that."""
    rate = traffic.rate / replicas
    slower = 1 / (1 - rate * decode_s(site, traffic)[0])
    mean_s = slower * statistics.fmean(work_s)
    square = slower**2 * statistics.fmean(one * one for one in work_s)
    return rate * square / (2 * (1 - rate * mean_s))


_TTFT = {
    "replicas": "the figure of this name, rounded up",
    "hit_share": "prompt tokens known, on the device or in a tier ÷ prompt tokens",
    "mean_s": "loading and computing, alone on a replica; the median and the slowest 5 and 1 in a "
    "hundred too",
    "queued_mean_s": "mean_s + rate × E[work²] ÷ (2 × (1 - rate × E[work])), with the rate of one "
    "replica and random arrivals; work: prefill ÷ the share of time that decoding leaves",
}
