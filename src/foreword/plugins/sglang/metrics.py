"""What our tiers did, in SGLang's own `/metrics`: its processes share prometheus_client's registry.

Names and meanings as in docs/reference/metrics.md, by SGLang's pool besides.
"""

from collections.abc import Iterator, Mapping
from functools import cache

from prometheus_client import Counter

from foreword.core.stats import TierStats

Labels = tuple[str, ...]  # pool and tier, then the reason where there is one


@cache
def _counter(name: str, text: str, *labels: str) -> Counter:
    """One for all storages that a process has had."""
    return Counter(f"foreword_kv_cache_offload_blocks_{name}", text, ("pool", "tier", *labels))


class Shown:
    """Adds to the process's counters what was not added before."""

    def __init__(self) -> None:
        self._before: dict[tuple[Counter, Labels], int] = {}

    def show(self, tiers: Mapping[str, tuple[TierStats, ...]]) -> None:
        for counter, labels, value in _values(tiers):
            more = value - self._before.get((counter, labels), 0)
            self._before[counter, labels] = value
            counter.labels(*labels).inc(max(0, more))


def _values(tiers: Mapping[str, tuple[TierStats, ...]]) -> Iterator[tuple[Counter, Labels, int]]:
    stored = _counter("stored", "Blocks written to a tier.")
    loaded = _counter("loaded", "Blocks that came back from a tier, verified.")
    lost = _counter("lost", "Blocks that did not come back, by reason.", "reason")
    dropped = _counter("dropped", "Blocks not written: too many waited, or no parent was kept.")
    for pool, stats in tiers.items():
        for tier in stats:
            yield stored, (pool, tier.name), tier.num_stored_blocks
            yield loaded, (pool, tier.name), tier.num_loaded_blocks
            yield dropped, (pool, tier.name), tier.num_dropped_blocks
            for reason, num_blocks in list(tier.lost.items()):
                yield lost, (pool, tier.name, reason), num_blocks
