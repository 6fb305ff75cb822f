"""Traffic: of each request of a trace, what caches of many sizes would have reused, in one pass."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from foreword.sim.opt import Future
from foreword.sim.prompt import Visit, visit
from foreword.sim.replay import BLOCK_SIZE
from foreword.sim.trace import Record, Trace, TraceError
from foreword.sim.trial import UNLIMITED, CoreTrial, Setting

_POINTS = 12
_FUTURE_SHARE = 0.2  # of the time, for the progress that is told


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace's requests by arrival. `hits`: by capacity in tokens, ascending, how many tokens of
    each prompt a cache of that size would have reused; the largest has room for everything."""

    num_tokens: Sequence[int]
    num_output_tokens: Sequence[int]
    span_s: float
    hits: Mapping[int, Sequence[int]]

    def known(self, capacity: float) -> Sequence[int]:
        """`hits` of the largest size that is no larger than that; zeros where there is none."""
        fitting = [size for size in self.hits if size <= capacity]
        return self.hits[fitting[-1]] if fitting else [0] * len(self.num_tokens)

    def share(self, hits: Sequence[int]) -> float:
        """Of all prompt tokens."""
        return sum(hits) / sum(self.num_tokens)

    @property
    def rate(self) -> float:
        """Requests a second; 0 where the trace has no times."""
        return len(self.num_tokens) / self.span_s if self.span_s else 0.0


def traffic_of(
    trace: Trace,
    sizes: Sequence[float],
    block_size: int = BLOCK_SIZE,
    progress: Callable[[float], None] = lambda _share: None,
) -> Traffic:
    """Replays a trace under LRU, one request after another, with caches of these sizes (tokens) and
    of others up to the one that holds everything. `block_size` is as Rules has it. Raises
    TraceError where there are no requests."""
    if not len(trace):
        raise TraceError("the trace has no requests")
    ids_each = 1 if trace.id_tokens > 1 else block_size
    block_tokens = ids_each * trace.id_tokens

    def visited(record: Record) -> Visit:
        return visit(record, block_size)

    with Future(trace, visited, lambda share: progress(share * _FUTURE_SHARE)) as future:
        all_blocks = future.num_blocks
        trials = {
            blocks * block_tokens: CoreTrial(
                Setting("lru", (blocks if blocks < all_blocks else UNLIMITED,)),
                future,
                ids_each,
                trace.id_tokens,
            )
            for blocks in _grid(
                [int(size // block_tokens) for size in sizes], future.most_slots, all_blocks
            )
        }
        hits = {size: array("q") for size in trials}
        lengths, outputs, last_s = array("q"), array("q"), 0.0
        for number, record in enumerate(trace):
            seen = visited(record)
            for size, trial in trials.items():
                before = trial.outcome.total.num_hit_tokens
                trial.serve(record, seen)
                hits[size].append(trial.outcome.total.num_hit_tokens - before)
            lengths.append(record.num_tokens)
            outputs.append(record.num_output_tokens)
            last_s = record.arrival_s
            progress(_FUTURE_SHARE + (1 - _FUTURE_SHARE) * (number + 1) / len(trace))
    return Traffic(lengths, outputs, last_s, hits)


def _grid(wanted: Sequence[int], least: int, most: int) -> list[int]:
    """Numbers of blocks, ascending: those wanted, and between what the longest request takes and
    all a row of equal factors, where none is wanted nearby."""
    most = max(1, most)  # of prompts that fill no block there is none
    factor = max(1.5, (most / least) ** (1 / _POINTS))
    row = {int(most / factor**power) for power in range(1, _POINTS + 1)}
    row -= {one for one in row for near in wanted if 0.9 < near / max(1, one) < 1.1}
    return [*sorted(blocks for blocks in {*wanted, *row} if least <= blocks < most), most]
