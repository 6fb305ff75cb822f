"""LowerTiers: where blocks come from that the device lacks, and where those go that it publishes.

It plans over all tiers below the device, the fastest first, and keeps what it wants done, as
effects, until asked.
"""

from collections.abc import Mapping, Sequence
from math import inf

from foreword.core.block import BlockHash, Chain
from foreword.core.cost import Costs
from foreword.core.lease import BlockState, Drop, Lease, Load, Store
from foreword.core.plan import Present, RestorePlan, plan_restore
from foreword.core.tier import Tier

PROBE_S = 5.0  # a tier that plans leave alone is tried that often
PROBE_READS = 4  # of so many reads


class LowerTiers:
    """Each tier is known by its place in `tiers`."""

    def __init__(self, tiers: Sequence[Tier], costs: Costs | None = None) -> None:
        self.tiers = tuple(tiers)
        self.costs = costs
        self._effects: list[Store | Drop] = []

    def runs(
        self, chain: Chain, start: int, stop: int, elsewhere: Mapping[int, int]
    ) -> list[tuple[int, int, int]]:
        """Where blocks from `start` to `stop` come from, without a gap, each from the fastest tier
        that has it: tier, first block, end. `elsewhere` as in `KVCache.admit`."""
        runs: list[tuple[int, int, int]] = []
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
        self,
        chain: Chain,
        start: int,
        stop: int,
        elsewhere: Mapping[int, int],
        present: Present,
    ) -> RestorePlan:
        """What to load of blocks `start` to `stop` of a request's chain, which the device lacks."""
        runs = self.runs(chain, start, stop, elsewhere)
        known = start * chain.block_size
        if self.costs is None or not runs:
            return RestorePlan(len(chain), known, tuple(runs), late_s=inf)
        return plan_restore(self.costs, len(chain), known, runs, present)

    def load(self, lease: Lease, stop: int) -> list[Load]:
        """Begin a lease's plan; and try a tier that has had none of late, on blocks up to `stop`
        that the lease computes itself."""
        plan, hashes = lease.plan, lease.chain.hashes
        assert plan is not None
        for number, first, end in plan.loads:
            self.tiers[number].renew(hashes, end)  # so that it stays until it is read
            lease.states[first:end] = bytes([BlockState.LOADING]) * (end - first)
        loads = [Load(lease, *run) for run in plan.loads]
        if loads:
            lease.late_at_s = lease.admitted_s + plan.late_s
        if self.costs is None:
            return loads
        start = plan.num_device_tokens // lease.chain.block_size
        for number, (tier, fit) in enumerate(zip(self.tiers, self.costs.tiers, strict=True)):
            if any(load.tier == number for load in loads):
                tier.next_probe_s = lease.admitted_s + PROBE_S
            elif tier.reads and lease.admitted_s >= tier.next_probe_s:
                end = start + tier.num_ready(hashes, start, stop)
                first = max(start, end - PROBE_READS * fit.read_bytes // self.costs.block_bytes)
                if end > start:
                    tier.next_probe_s = lease.admitted_s + PROBE_S
                    loads.append(Load(lease, number, first, end, probe=True))
        return loads

    def reconsider(self, lease: Lease, now_s: float) -> None:
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
        elif more_s + rest_s < all_s and now_s + more_s + all_s <= promised_s:
            lease.num_waits += 1
            lease.late_at_s = now_s + more_s
        else:
            lease.take_back()

    def keep(self, lease: Lease) -> None:
        """Let each tier have all published blocks of a lease that it lacks."""
        for number in range(len(self.tiers)):
            self._store(lease, number)

    def forget(self, load: Load, start: int, stop: int) -> None:
        """Blocks `start` to `stop` of a load are not in their tier, or not as they were."""
        lease, hashes = load.lease, load.lease.chain.hashes[start:stop]
        for block_hash in hashes:
            self.tiers[load.tier].remove(block_hash)
        if load.tier in lease.elsewhere:
            others = min(lease.elsewhere[load.tier], start)
            lease.elsewhere = {**lease.elsewhere, load.tier: others}
        self._drop(load.tier, hashes)

    def touch(self, lease: Lease) -> None:
        """The published blocks of a lease were used now."""
        for tier in self.tiers:
            tier.touch(lease.chain.hashes, lease.num_published)

    def clear(self) -> None:
        """Forget all, and have it dropped."""
        for number, tier in enumerate(self.tiers):
            self._drop(number, tier.clear())

    def stored(self, tier: int, hashes: Sequence[BlockHash], *, ok: bool) -> None:
        """What came of a Store, or of a part of it."""
        for block_hash in hashes:
            if ok:
                self.tiers[tier].stored(block_hash)
            else:
                self.tiers[tier].remove(block_hash)
        if not ok:  # another Store of it may be under way, which nobody would know of now
            self._drop(tier, list(hashes))

    def resize(self, tier: int, capacity: int) -> None:
        """A tier has room for more or fewer blocks than before."""
        self.tiers[tier].capacity = capacity
        self._drop(tier, self.tiers[tier].make_room())

    def tick(self, now_s: float) -> None:
        """As KVCache.tick."""
        for tier in self.tiers:
            tier.order.now_s = now_s

    def take_effects(self) -> list[Store | Drop]:
        """What to do since the last call, in order. Ask after each call that publishes or loses."""
        effects, self._effects = self._effects, []
        return effects

    def _store(self, lease: Lease, number: int) -> None:
        """Let a tier have all published blocks of a lease that it lacks. Parents first: a child is
        kept only below its parent."""
        tier, hashes, stop = self.tiers[number], lease.chain.hashes, lease.num_published
        if not tier.writes:
            return
        at = lease.num_stored.get(number, 0)
        if not at or not tier.num_kept(hashes, at - 1, at):
            # Its end left meanwhile, or it is the first time: all is looked at.
            at = min(lease.elsewhere.get(number, 0), stop)
        while (at := at + tier.num_kept(hashes, at, stop)) < stop:
            tier.renew(hashes, at)
            first = at
            dropped: list[BlockHash] = []
            while at < stop and not tier.num_kept(hashes, at, at + 1):
                parent = hashes[at - 1] if at else lease.chain.root
                dropped += tier.make_room(protected=parent)
                if not tier.claim(hashes[at], parent):
                    stop = at  # its own parents fill it
                    break
                at += 1
            self._drop(number, dropped)
            if at > first:
                block_ids = tuple(lease.block_ids[first:at])
                self._effects.append(Store(number, lease.chain, first, block_ids))
        lease.num_stored[number] = at

    def _drop(self, tier: int, hashes: list[BlockHash]) -> None:
        if hashes:
            self._effects.append(Drop(tier, tuple(hashes)))
