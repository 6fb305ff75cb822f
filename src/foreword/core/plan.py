"""RestorePlan: which blocks of a prompt are loaded and which are computed, and what that takes.

All tiers load at once, each from the back of what it has, while the device computes from the front
of what it lacks: where both meet is chosen so that the first token comes soonest. Nothing is loaded
that would not pay, nor where the usual share of late reads would make the request slower than
computing it all. A second of the device delays all others that run or wait by a second: what they
lose counts too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from foreword.core.cost import Costs

Extent = tuple[int, int, int]  # tier, first block, end

# What reuse may cost a request at most, beside computing it all. It is late by more than that in
# `_RARE` of cases at most.
SLACK_SHARE, SLACK_S = 0.01, 0.001
_RARE = 0.01


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Of a prompt of `num_tokens` the first `num_device_tokens` are on the device; `loads` are in
    prefix order; the rest is computed. Seconds from admission: when the loads should have come and
    when they are late; when the first token should come, and when it would if all were computed."""

    num_tokens: int
    num_device_tokens: int
    loads: tuple[Extent, ...] = ()
    load_s: float = 0.0
    late_s: float = 0.0
    total_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def gain_s(self) -> float:
        return self.recompute_s - self.total_s

    @property
    def promised_s(self) -> float:
        """Seconds that the first token should never take longer than."""
        return self.recompute_s * (1 + SLACK_SHARE) + SLACK_S


@dataclass(frozen=True, slots=True)
class Present:
    """How things stand when a request is admitted: for how long the device computes for others
    before it, and how many others run or wait."""

    ahead_s: float = 0.0
    num_others: int = 0


ALONE = Present()


def plan_restore(
    costs: Costs, num_tokens: int, num_device_tokens: int, runs: Sequence[Extent], present: Present
) -> RestorePlan:
    """The quickest way to the first token of a prompt, of which the device has whole blocks. `runs`
    are what tiers have after these, without a gap, each tier once. All is loaded before anything is
    known of the steps' costs."""
    if costs.step is None:
        return RestorePlan(num_tokens, num_device_tokens, tuple(runs), late_s=inf)
    all_s = present.ahead_s + costs.compute_s(num_device_tokens, num_tokens)
    nothing = RestorePlan(num_tokens, num_device_tokens, total_s=all_s, recompute_s=all_s)
    for cautious in (False, True):
        plan = _quickest(costs, nothing, runs, present, cautious=cautious)
        if plan is nothing or _slow_case_s(costs, plan, present.ahead_s) <= plan.promised_s:
            return plan
    return nothing


def _quickest(
    costs: Costs,
    nothing: RestorePlan,
    runs: Sequence[Extent],
    present: Present,
    *,
    cautious: bool,
) -> RestorePlan:
    """Of loading the first of the runs, or more of them, or nothing, the best. Each run's own best
    split makes all before its end ready soonest, and what follows begins the sooner for that: so
    run by run is best over all. The `cautious` split expects each read when it is late."""
    best, others, size = None, present.num_others, costs.block_size
    least_s = nothing.recompute_s + (nothing.recompute_s - present.ahead_s) * others
    loads: tuple[Extent, ...] = ()
    ready_s, device_s, load_s, late_s = present.ahead_s, 0.0, 0.0, 0.0
    for run in runs:
        tier, _start, stop = run
        meet, front_s, ready_s = _meet(costs, run, ready_s, others, cautious=cautious)
        device_s += front_s
        if meet == stop:
            continue
        loads = (*loads, (tier, meet, stop))
        fit, num_bytes = costs.tiers[tier], (stop - meet) * costs.block_bytes
        load_s = max(load_s, fit.load_s(num_bytes))
        late_s = max(late_s, fit.late_s(num_bytes))
        rest_s = costs.compute_s(stop * size, nothing.num_tokens)
        total_s = ready_s + rest_s
        if total_s + (device_s + rest_s) * others < least_s:
            least_s = total_s + (device_s + rest_s) * others
            best = loads, load_s, late_s, total_s
    if best is None:
        return nothing
    return RestorePlan(nothing.num_tokens, nothing.num_device_tokens, *best, nothing.recompute_s)


def _meet(
    costs: Costs, run: Extent, ready_s: float, num_others: int, *, cautious: bool
) -> tuple[int, float, float]:
    """From which block on a run is loaded, so that it is all there soonest; for how long what is
    before that is computed, from `ready_s` on; and when all is there. The longer the front the
    later it is computed and the sooner the rest is loaded, so the best is where these cross, or one
    before; or for others' sake all is loaded."""
    tier, start, stop = run
    size, block_bytes = costs.block_size, costs.block_bytes
    load_s = costs.tiers[tier].late_s if cautious else costs.tiers[tier].load_s
    all_s = load_s((stop - start) * block_bytes)
    if all_s <= ready_s:
        return start, 0.0, ready_s
    # Two places between which they cross, how long the front takes there, and by how much it is
    # later than the rest. That is all but a straight line, so they cross about where it is 0; what
    # is left is halved in turns, for where the line bends.
    low, low_s, low_gap_s = start, 0.0, ready_s - all_s
    high, high_s = stop, costs.compute_s(start * size, stop * size)
    high_gap_s, halves = ready_s + high_s, False
    while (width := high - low - 1) > 0:
        share = 0.5 if halves else low_gap_s / (low_gap_s - high_gap_s)
        at = low + 1 + int(width * share)
        at_s = costs.compute_s(start * size, at * size)
        gap_s = ready_s + at_s - load_s((stop - at) * block_bytes)
        if gap_s < 0:
            low, low_s, low_gap_s = at, at_s, gap_s
        else:
            high, high_s, high_gap_s = at, at_s, gap_s
        halves = not halves
    meet, front_s, there_s = high, high_s, ready_s + high_s
    if ready_s + low_s - low_gap_s <= there_s:
        meet, front_s, there_s = low, low_s, ready_s + low_s - low_gap_s
    if all_s <= there_s + front_s * num_others:
        return start, 0.0, all_s
    return meet, front_s, there_s


def _slow_case_s(costs: Costs, plan: RestorePlan, ahead_s: float) -> float:
    """When the first token comes if as many reads are late as seldom are: what they should have
    brought is computed with the rest, in one go."""
    size, known = costs.block_size, plan.num_device_tokens
    num_late_blocks, front, at = 0, 0, known // size
    for tier, start, stop in plan.loads:
        fit = costs.tiers[tier]
        read_blocks = max(1, fit.read_bytes // costs.block_bytes)
        num_reads = -(-(stop - start) // read_blocks)
        num_late_blocks += min(num_late(num_reads, fit.late_share) * read_blocks, stop - start)
        front, at = front + start - at, stop
    front_s = ahead_s + costs.compute_s(known, known + front * size)
    rest = (at - num_late_blocks) * size
    return max(front_s, plan.late_s) + costs.compute_s(rest, plan.num_tokens)


def num_late(num_reads: int, share: float) -> int:
    """How many of so many reads are late, each with probability `share`, at most but in `_RARE`
    of cases: a quantile of the binomial distribution."""
    if share >= 1:
        return num_reads
    odds, chance = share / (1 - share), (1 - share) ** num_reads
    count, total = 0, chance
    while total < 1 - _RARE and count < num_reads and chance > 0:
        chance *= odds * (num_reads - count) / (count + 1)
        count += 1
        total += chance
    return count if total >= 1 - _RARE else num_reads
