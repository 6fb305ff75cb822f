"""LowerTiers: where blocks come from that the device lacks, and where those go that it publishes.

It plans over all tiers below the device, the fastest first, and keeps what it wants done, as
effects, until asked.
"""

from collections.abc import Mapping, Sequence

from foreword.core.block import BlockHash, Chain
from foreword.core.lease import Drop, Lease, Load, Store
from foreword.core.tier import Tier


class LowerTiers:
    """Each tier is known by its place in `tiers`."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
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
                if tier.reads:
                    own = start + tier.num_ready(chain.hashes, start, stop)
                    end = max(own, min(elsewhere.get(number, 0), stop))
                    if end > start:
                        runs.append((number, start, end))
                        start = end
        return runs

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
            tier.touch(hashes, at)
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
