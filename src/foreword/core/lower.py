"""LowerTiers: which blocks of the device go to the tiers below it, and which leave these.

It keeps what it wants done, as effects, until asked.
"""

from collections.abc import Sequence

from foreword.core.block import BlockHash, BlockId, Chain
from foreword.core.index import Node, RadixIndex
from foreword.core.lease import Drop, Lease, Load, Store
from foreword.core.place import ALL, Placement
from foreword.core.plan import Extent
from foreword.core.reuse import Source
from foreword.core.tier import Tier


class LowerTiers:
    """Each tier is known by its place in `tiers`; `placement` says how much each is to have."""

    def __init__(self, tiers: Sequence[Tier], placement: Placement) -> None:
        self.tiers = tuple(tiers)
        self.placement = placement
        self._effects: list[Store | Drop] = []
        self._barred: set[BlockHash] = set()  # from all tiers, while the device has them

    def admitted(self, lease: Lease, num_device: int, runs: Sequence[Extent]) -> None:
        """A lease begins with `num_device` blocks of the device, then `runs` of others."""
        if not self.tiers:
            return
        hashes, hints = lease.chain.hashes, lease.hints
        for number, tier in enumerate(self.tiers):
            first = min(lease.elsewhere.get(number, 0), len(hashes))
            lease.num_stored[number] = first + tier.num_kept(hashes, first, len(hashes))
        sources: list[Source] = [(None, 0, num_device), *runs]
        most = ALL if hints.cacheable else 0
        if hints.max_offload_tokens is not None:
            most = min(most, hints.max_offload_tokens // lease.chain.block_size)
        lease.num_wanted = [min(most, num) for num in self.placement.wanted(lease, sources)]

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
            tier.touch(hashes, stop, lease.hints.ttl_s or 0.0)

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
                dropped += tier.make_room(parent, chain.root)
                if not tier.claim(hashes[at], parent, chain.root):
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
