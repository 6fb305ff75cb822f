"""LowerTiers: where blocks come from that the device lacks, and where those go that it has.

It plans over all tiers below the device, the fastest first, and keeps what it wants done, as
effects, until asked.
"""

from collections.abc import Mapping, Sequence
from math import inf

from foreword.core.block import BlockHash, BlockId, Chain
from foreword.core.cost import Costs
from foreword.core.index import Node, RadixIndex
from foreword.core.lease import BlockState, Drop, Lease, Load, Store
from foreword.core.place import Placement
from foreword.core.plan import Extent, Present, RestorePlan, plan_restore
from foreword.core.reuse import Source
from foreword.core.tier import Tier

PROBE_S = 5.0  # a tier that plans leave alone is tried that often
PROBE_READS = 4  # of so many reads


class LowerTiers:
    """Each tier is known by its place in `tiers`; `placement` says how much each is to have."""

    def __init__(self, tiers: Sequence[Tier], placement: Placement) -> None:
        self.tiers = tuple(tiers)
        self.placement = placement
        self.costs: Costs | None = None  # None: all that a tier has is loaded, whatever it takes
        self._effects: list[Store | Drop] = []
        self._barred: set[BlockHash] = set()  # from all tiers, while the device has them

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
        self, chain: Chain, start: int, runs: Sequence[Extent], present: Present
    ) -> RestorePlan:
        """What to load of `runs`, which the device lacks from block `start` of the chain on."""
        known = start * chain.block_size
        if self.costs is None or not runs:
            plan = RestorePlan(len(chain), known, tuple(runs), late_s=inf)
        else:
            plan = plan_restore(self.costs, len(chain), known, runs, present)
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

    def admitted(self, lease: Lease, num_device: int, runs: Sequence[tuple[int, int, int]]) -> None:
        """A lease begins with `num_device` blocks of the device, then `runs` of others."""
        if not self.tiers:
            return
        hashes, hints = lease.chain.hashes, lease.hints
        for number, tier in enumerate(self.tiers):
            first = min(lease.elsewhere.get(number, 0), len(hashes))
            lease.num_stored[number] = first + tier.num_kept(hashes, first, len(hashes))
        sources: list[Source] = [(None, 0, num_device), *runs]
        wanted = self.placement.wanted(lease, sources)
        if hints.max_offload_tokens is not None:
            most = hints.max_offload_tokens // lease.chain.block_size
            wanted = [min(most, num_blocks) for num_blocks in wanted]
        lease.num_wanted = wanted

    def keep(self, lease: Lease) -> None:
        """Let each tier have the published blocks of a lease that it is to have and lacks."""
        for number, wanted in enumerate(lease.num_wanted):
            stop, hashes = min(lease.num_published, wanted), lease.chain.hashes
            at = min(lease.num_stored[number], stop)
            if not at or not self.tiers[number].num_kept(hashes, at - 1, at):
                # Its end left meanwhile, or was never there: all is looked at.
                at = min(lease.elsewhere.get(number, 0), stop)
            lease.num_stored[number] = self._store(number, lease.chain, lease.block_ids, at, stop)

    def ended(self, lease: Lease) -> None:
        """A lease ends: what is on the device may be evicted from now on."""
        if not self.tiers:
            return
        self.keep(lease)
        self.placement.ended(lease)
        hashes, stop = lease.chain.hashes, lease.num_published
        if lease.hints.max_offload_tokens is not None and self.placement.on_eviction:
            most = lease.hints.max_offload_tokens // lease.chain.block_size
            self._barred.update(hashes[most:stop])
        for tier in self.tiers:
            tier.touch(hashes, stop)

    def evicted(self, index: RadixIndex, leaf: Node, num_blocks: int) -> None:
        """The device is about to drop the last blocks of a leaf: their only chance, if they are to
        go down. What they stand on goes with them where it is not there."""
        if not (self.placement.on_eviction and leaf.hashes):
            return
        kept = all(
            tier.num_kept(leaf.hashes, len(leaf.hashes) - 1, len(leaf.hashes))
            for tier in self.tiers
        )
        if not kept:
            chain, block_ids = index.path(leaf)
            barred = self._barred
            stop = next((at for at, h in enumerate(chain.hashes) if h in barred), len(block_ids))
            for number in range(len(self.tiers)):
                self._store(number, chain, block_ids, 0, stop)
        self._barred.difference_update(leaf.hashes[-num_blocks:])

    def forget(self, load: Load, start: int, stop: int) -> None:
        """Blocks `start` to `stop` of a load are not in their tier, or not as they were."""
        lease, hashes = load.lease, load.lease.chain.hashes[start:stop]
        for block_hash in hashes:
            self.tiers[load.tier].remove(block_hash)
        if load.tier in lease.elsewhere:
            others = min(lease.elsewhere[load.tier], start)
            lease.elsewhere = {**lease.elsewhere, load.tier: others}
        self._drop(load.tier, hashes)

    def clear(self) -> None:
        """Forget all, and have it dropped."""
        self._barred.clear()
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
        self._made_room(tier, self.tiers[tier].make_room())

    def tick(self, now_s: float) -> None:
        """As KVCache.tick."""
        for tier in self.tiers:
            tier.order.now_s = now_s

    def take_effects(self) -> list[Store | Drop]:
        """What to do since the last call, in order. Ask after each call that publishes or loses."""
        effects, self._effects = self._effects, []
        return effects

    def _store(
        self, number: int, chain: Chain, block_ids: Sequence[BlockId], at: int, stop: int
    ) -> int:
        """Let a tier have what it lacks of a chain's blocks from `at` to `stop`, which are in
        `block_ids`. Parents first: a child is kept only below its parent. Returns where it ends."""
        tier, hashes = self.tiers[number], chain.hashes
        while tier.writes and (at := at + tier.num_kept(hashes, at, stop)) < stop:
            tier.renew(hashes, at)
            first = at
            dropped: list[BlockHash] = []
            while at < stop and not tier.num_kept(hashes, at, at + 1):
                parent = hashes[at - 1] if at else chain.root
                dropped += tier.make_room(protected=parent)
                if not tier.claim(hashes[at], parent):
                    stop = at  # its own parents fill it
                    break
                at += 1
            self._made_room(number, dropped)
            if at > first:
                self._effects.append(Store(number, chain, first, tuple(block_ids[first:at])))
        return at

    def _made_room(self, tier: int, dropped: list[BlockHash]) -> None:
        if dropped:
            self.placement.dropped(tier, dropped)
            self._drop(tier, dropped)

    def _drop(self, tier: int, hashes: list[BlockHash]) -> None:
        if hashes:
            self._effects.append(Drop(tier, tuple(hashes)))
