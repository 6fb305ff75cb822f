"""Restores: where the blocks come from that the device lacks, and whether that was worth it.

It plans over all tiers below the device, the fastest first; decides again about what is late; and
turns a tier off that loses, and on again when it would win.
"""

from collections.abc import Mapping, Sequence
from math import inf

from foreword.core.block import Chain
from foreword.core.cost import Costs
from foreword.core.lease import BlockState, Lease, Load
from foreword.core.plan import ALONE, Extent, Present, RestorePlan, plan_restore
from foreword.core.switch import Switch
from foreword.core.tier import Tier

PROBE_S = 5.0  # a tier that plans leave alone is tried that often
PROBE_READS = 4  # of so many reads


class Restores:
    """Each tier is known by its place in `tiers`."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        self.costs: Costs | None = None  # None: all that a tier has is loaded, whatever it takes
        self.switches = tuple(Switch() for _ in self.tiers)
        self.now_s = 0.0
        # By tier, the last request that found blocks there: its tokens, those on the device, where.
        self._cases: dict[int, tuple[int, int, Extent]] = {}

    def runs(
        self, chain: Chain, start: int, stop: int, elsewhere: Mapping[int, int]
    ) -> list[Extent]:
        """Where blocks from `start` to `stop` may come from, without a gap, each from the fastest
        tier that has it. `elsewhere` as in `KVCache.admit`."""
        runs: list[Extent] = []
        at = -1
        while at < start < stop:
            at = start
            for number, tier in enumerate(self.tiers):
                if tier.reads and tier.enabled:
                    own = start + tier.num_ready(chain.hashes, start, stop)
                    end = max(own, min(elsewhere.get(number, 0), stop))
                    if end > start:
                        runs.append((number, start, end))
                        start = end
        return runs

    def plan(
        self, chain: Chain, start: int, runs: Sequence[Extent], present: Present
    ) -> RestorePlan:
        """What to load of `runs`, which the device lacks from block `start` of the chain on."""
        known = start * chain.block_size
        if self.costs is None or not runs:
            plan = RestorePlan(len(chain), known, tuple(runs), late_s=inf)
        else:
            plan = plan_restore(self.costs, len(chain), known, runs, present)
            used = {load[0] for load in plan.loads}
            for run in runs:
                self._cases[run[0]] = (len(chain), known, run)
                if run[0] not in used:
                    self._judge(run[0], 0.0)
        for number, _first, end in plan.loads:  # so that it stays until it is read
            self.tiers[number].renew(chain.hashes, end)
        return plan

    def load(self, lease: Lease, stop: int) -> list[Load]:
        """Begin a lease's plan; and try a tier that has had none of late, on blocks up to `stop`
        that the lease computes itself."""
        plan, hashes = lease.plan, lease.chain.hashes
        assert plan is not None
        for _tier, first, end in plan.loads:
            lease.states[first:end] = bytes([BlockState.LOADING]) * (end - first)
        loads = [Load(lease, *run) for run in plan.loads]
        if loads:
            lease.late_at_s = lease.admitted_s + plan.late_s
        if self.costs is None:
            return loads
        start = plan.num_device_tokens // lease.chain.block_size
        for number, (tier, fit) in enumerate(zip(self.tiers, self.costs.tiers, strict=True)):
            if any(load.tier == number for load in loads):
                tier.next_probe_s = self.now_s + PROBE_S
                continue
            end = start + tier.num_ready(hashes, start, stop) if tier.reads else start
            if end == start:
                continue
            if not tier.enabled:
                self._cases[number] = (
                    len(lease.chain),
                    plan.num_device_tokens,
                    (number, start, end),
                )
                self.retry(number)
            if self.now_s >= tier.next_probe_s:
                tier.next_probe_s = self.now_s + PROBE_S
                first = max(start, end - PROBE_READS * fit.read_bytes // self.costs.block_bytes)
                loads.append(Load(lease, number, first, end, probe=True))
        return loads

    def reconsider(self, lease: Lease) -> None:
        """What a lease awaits is late. Wait on while that is likely quicker than to compute it, and
        would not break the promise in vain; each time twice as long."""
        costs, plan = self.costs, lease.plan
        assert costs is not None
        assert plan is not None
        size, num_blocks, more_s = lease.chain.block_size, 0, 0.0
        for number, start, stop in plan.loads:
            awaited = lease.states.count(BlockState.LOADING, start, stop)
            num_blocks += awaited
            more_s = max(more_s, costs.tiers[number].cost.load_s(awaited * costs.block_bytes))
        end = plan.loads[-1][2] * size
        rest_s = costs.compute_s(end, plan.num_tokens)
        all_s = costs.compute_s(end - num_blocks * size, plan.num_tokens)
        more_s *= 1 << lease.num_waits
        promised_s = lease.admitted_s + plan.promised_s
        if not num_blocks:
            lease.late_at_s = inf
        elif more_s + rest_s < all_s and self.now_s + more_s + all_s <= promised_s:
            lease.num_waits += 1
            lease.late_at_s = self.now_s + more_s
        else:
            lease.take_back()

    def judge(self, lease: Lease) -> None:
        """A prompt is computed: what was won by each tier that its plan had, and what was lost."""
        plan, costs = lease.plan, self.costs
        if plan is None or costs is None or costs.step is None or not plan.recompute_s:
            return
        known = plan.num_device_tokens
        for number in dict.fromkeys(load[0] for load in plan.loads):
            end = known + lease.restored.get(number, 0)
            gain_s = costs.compute_s(known, plan.num_tokens) - costs.compute_s(end, plan.num_tokens)
            gain_s -= lease.waited_s.get(number, 0.0)
            known, ledger = end, self.switches[number].ledger
            ledger.planned_s += plan.total_s
            ledger.actual_s += self.now_s - lease.admitted_s
            ledger.recompute_s += plan.recompute_s
            ledger.regret_s.add(max(0.0, -gain_s))
            self._judge(number, gain_s)

    def retry(self, number: int) -> None:
        """Turn a tier on again if its last request would be quicker with it now."""
        case = self._cases.get(number)
        if case is not None and self.costs is not None:
            num_tokens, known, run = case
            plan = plan_restore(self.costs, num_tokens, known, [run], ALONE)
            num_reads = self.costs.tiers[number].num_reads
            self.switches[number].retry(self.now_s, plan.gain_s, num_reads)
            self.tiers[number].enabled = self.switches[number].enabled

    def _judge(self, number: int, gain_s: float) -> None:
        assert self.costs is not None
        self.switches[number].judge(self.now_s, gain_s, self.costs.tiers[number].num_reads)
        self.tiers[number].enabled = self.switches[number].enabled
