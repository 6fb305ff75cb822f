"""`/metrics`: an engine's counts as Prometheus reads them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from foreword.core.stats import EngineStats, Histogram, TierStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Shown:
    """One metric. `kind` is Prometheus's; a counter's name has no `_total` here. `of` gives its
    value, or values by what `label` tells apart."""

    name: str
    kind: str
    help: str
    of: Callable[[EngineStats], float | Histogram | Mapping[str, float | Histogram]]
    label: str = ""

    def family(self, stats: EngineStats) -> Metric:
        labels = (self.label,) if self.label else ()
        value = self.of(stats)
        values = value if isinstance(value, Mapping) else {"": value}
        if self.kind == "histogram":
            histogram = HistogramMetricFamily(self.name, self.help, labels=labels)
            for name, one in values.items():
                assert isinstance(one, Histogram)
                histogram.add_metric([name][: len(labels)], list(one.cumulative()), one.total)
            return histogram
        family = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        shown = family(self.name, self.help, labels=labels)
        for name, one in values.items():
            assert not isinstance(one, Histogram)
            shown.add_metric([name][: len(labels)], one)
        return shown


def _by_tier(
    of: Callable[[TierStats], float | Histogram],
) -> Callable[[EngineStats], Mapping[str, float | Histogram]]:
    return lambda stats: {tier.name: of(tier) for tier in stats.tiers}


def _hit_tokens(stats: EngineStats) -> Mapping[str, float | Histogram]:
    below = {tier.name: tier.num_hit_tokens for tier in stats.tiers}
    return {"device": stats.num_hit_tokens - sum(below.values()), **below}


def _lost_blocks(stats: EngineStats) -> Mapping[str, float | Histogram]:
    return {
        reason: sum(tier.lost.get(reason, 0) for tier in stats.tiers)
        for reason in ("missing", "damaged", "late", "failed")
    }


SHOWN = (
    Shown(
        "foreword_prefix_cache_queries",
        "counter",
        "Requests that looked for a known prefix. The hit rate is hits / queries.",
        lambda stats: stats.num_queries,
    ),
    Shown(
        "foreword_prefix_cache_hits",
        "counter",
        "Requests that found one, of at least one token.",
        lambda stats: stats.num_hits,
    ),
    Shown(
        "foreword_prefix_cache_hit_tokens",
        "counter",
        "Prompt tokens that were known and not computed, by where they were.",
        _hit_tokens,
        "tier",
    ),
    Shown(
        "foreword_prefix_cache_miss_tokens",
        "counter",
        "Prompt tokens that were computed.",
        lambda stats: stats.num_miss_tokens,
    ),
    Shown(
        "foreword_ttft_seconds",
        "histogram",
        "Time from a request's arrival in the engine to its first token.",
        lambda stats: stats.ttft_s,
    ),
    Shown(
        "foreword_kv_cache_gpu_usage_bytes",
        "gauge",
        "Blocks of the device's pool that hold KV, leased or cached. With --device cpu the pool is "
        "in main memory.",
        lambda stats: stats.device_bytes,
    ),
    Shown(
        "foreword_kv_cache_gpu_leased_bytes",
        "gauge",
        "Of those, the blocks of running sequences; the rest can be evicted at any time.",
        lambda stats: stats.leased_bytes,
    ),
    Shown(
        "foreword_kv_cache_cpu_usage_bytes",
        "gauge",
        "KV in the host tier. 0 without one.",
        lambda stats: sum(tier.num_bytes for tier in stats.tiers if tier.name == "host"),
    ),
    Shown(
        "foreword_kv_cache_disk_usage_bytes",
        "gauge",
        "What this server's part of the disk tier takes. 0 without one.",
        lambda stats: sum(tier.num_bytes for tier in stats.tiers if tier.name == "disk"),
    ),
    Shown(
        "foreword_kv_cache_offload_read_latency_seconds",
        "histogram",
        "Reads from tiers below the device, some blocks each. None without a tier.",
        _by_tier(lambda tier: tier.read_s),
        "tier",
    ),
    Shown(
        "foreword_kv_cache_offload_write_latency_seconds",
        "histogram",
        "Writes to tiers below the device, some blocks each. None without a tier.",
        _by_tier(lambda tier: tier.write_s),
        "tier",
    ),
    Shown(
        "foreword_kv_cache_offload_blocks_stored",
        "counter",
        "Blocks written to a tier.",
        _by_tier(lambda tier: tier.num_stored_blocks),
        "tier",
    ),
    Shown(
        "foreword_kv_cache_offload_blocks_loaded",
        "counter",
        "Blocks that came back from a tier, verified.",
        _by_tier(lambda tier: tier.num_loaded_blocks),
        "tier",
    ),
    Shown(
        "foreword_kv_cache_offload_blocks_dropped",
        "counter",
        "Blocks not written, for too many waited to be.",
        _by_tier(lambda tier: tier.num_dropped_blocks),
        "tier",
    ),
    Shown(
        "foreword_kv_cache_offload_blocks_lost",
        "counter",
        "Blocks that did not come back and were computed: missing, damaged, too late, or the tier "
        "failed.",
        _lost_blocks,
        "reason",
    ),
    Shown(
        "foreword_tier_enabled",
        "gauge",
        "1 while requests may wait for a tier; 0 while it is off, for it lost or hangs: the log "
        "says why. It is on again when reads that nobody waits for say that it would win.",
        _by_tier(lambda tier: float(tier.enabled)),
        "tier",
    ),
    Shown(
        "foreword_restore_regret_seconds",
        "histogram",
        "By how much each request that was to get blocks from a tier was slower for waiting for it "
        "than with its blocks computed; 0 where it was quicker.",
        _by_tier(lambda tier: tier.ledger.regret_s),
        "tier",
    ),
    Shown(
        "foreword_restore_planned_seconds",
        "counter",
        "Of these requests, from admission to the first token as planned.",
        _by_tier(lambda tier: tier.ledger.planned_s),
        "tier",
    ),
    Shown(
        "foreword_restore_actual_seconds",
        "counter",
        "The same as it was.",
        _by_tier(lambda tier: tier.ledger.actual_s),
        "tier",
    ),
    Shown(
        "foreword_restore_recompute_seconds",
        "counter",
        "The same as planned without any tier.",
        _by_tier(lambda tier: tier.ledger.recompute_s),
        "tier",
    ),
    Shown(
        "foreword_kv_cache_eviction_count",
        "counter",
        "Cached blocks that gave way to others on the device.",
        lambda stats: stats.num_evicted_blocks,
    ),
    Shown(
        "foreword_gpu_stall_due_to_kv_restore_seconds",
        "counter",
        "Time in which all that ran waited for blocks from a tier.",
        lambda stats: stats.restore_stall_s,
    ),
    Shown(
        "foreword_request_log_dropped",
        "counter",
        "Requests that are not in the request log: it could not be written, or not fast enough.",
        lambda stats: stats.num_unlogged,
    ),
    Shown(
        "foreword_prefill_tokens",
        "counter",
        "Prompt tokens computed, those of preempted requests that return too.",
        lambda stats: stats.num_prefilled_tokens,
    ),
    Shown(
        "foreword_decode_tokens",
        "counter",
        "Tokens computed by sequences that write.",
        lambda stats: stats.num_decoded_tokens,
    ),
    Shown(
        "foreword_queue_depth",
        "gauge",
        "Sequences that wait for blocks or for their turn.",
        lambda stats: stats.num_waiting,
    ),
    Shown(
        "foreword_running_sequences",
        "gauge",
        "Sequences that hold blocks.",
        lambda stats: stats.num_running,
    ),
    Shown(
        "foreword_preemptions",
        "counter",
        "Sequences that had to give their blocks back and wait.",
        lambda stats: stats.num_preemptions,
    ),
)


class _Collected:
    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for shown in SHOWN:
            yield shown.family(self._stats)


def exposition(stats: EngineStats) -> bytes:
    """All metrics in Prometheus's text format, and on Linux its usual ones of the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(stats))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
