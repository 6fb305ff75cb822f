"""What an engine has counted since its start, for whoever shows it."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

# Seconds. From a cached prompt on a fast device to a long one on a slow.
LATENCY_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REGRET_BOUNDS = (0.0, 0.001, 0.01, 0.1, 1.0, 10.0)


@dataclass(slots=True)
class Histogram:
    """Observations by upper bound; `counts` has one more, for those above all bounds."""

    bounds: tuple[float, ...] = LATENCY_BOUNDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> Iterable[tuple[str, int]]:
        """Prometheus's view: by bound, how many observations are at most that."""
        num = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            num += count
            yield bound, num


@dataclass(slots=True)
class Ledger:
    """Of the requests that were to get blocks from a tier, in seconds: from admission to the first
    token as planned, as it was, and as it would have been without any tier; and by how much each
    was slower for waiting for this one."""

    planned_s: float = 0.0
    actual_s: float = 0.0
    recompute_s: float = 0.0
    regret_s: Histogram = field(default_factory=lambda: Histogram(REGRET_BOUNDS))


@dataclass(slots=True)
class TierStats:
    """What one tier below the device has done since the start, and what it holds now."""

    name: str
    num_hit_tokens: int = 0  # prompt tokens found there, counted as EngineStats counts hits
    num_loaded_blocks: int = 0
    busy_s: float = 0.0  # of its threads, in reading
    num_stored_blocks: int = 0
    num_dropped_blocks: int = 0  # not stored: too many waited to be written
    lost: dict[str, int] = field(default_factory=dict)  # blocks that a load did not bring, by why
    read_s: Histogram = field(default_factory=Histogram)
    write_s: Histogram = field(default_factory=Histogram)
    num_bytes: int = 0
    enabled: bool = True  # whether requests may wait for it
    ledger: Ledger = field(default_factory=Ledger)

    def count_lost(self, reason: str, num_blocks: int) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + num_blocks


@dataclass(slots=True)
class EngineStats:
    """Counts since start, and how things stand now. Tokens are counted when computed; a request
    when its first token comes, so one that was cancelled before is in none of the cache's counts.
    """

    num_queries: int = 0  # requests that looked for a known prefix
    num_hits: int = 0  # those that found one
    num_hit_tokens: int = 0  # prompt tokens found
    num_miss_tokens: int = 0  # prompt tokens that were not
    num_prefilled_tokens: int = 0
    num_decoded_tokens: int = 0
    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    ttft_s: Histogram = field(default_factory=Histogram)
    num_unlogged: int = 0  # requests that ended and are not in the request log
    restore_stall_s: float = 0.0  # in which all that ran waited for a tier
    num_waiting: int = 0  # sequences that hold no blocks
    num_running: int = 0
    device_bytes: int = 0  # of blocks that hold KV, leased or cached
    leased_bytes: int = 0  # of those, the blocks of running sequences
    tiers: tuple[TierStats, ...] = ()  # the fastest first
