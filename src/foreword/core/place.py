"""Placement: how many leading blocks of a request each tier below the device is to have.

What is stored lies below its parent, so the answer for a request and a tier is one number. It never
decides whether KV is right, only where it is kept.
"""

import sys
from collections.abc import Hashable, Sequence

from foreword.core.block import BlockHash
from foreword.core.cost import Costs
from foreword.core.lease import Lease
from foreword.core.reuse import Likeness, ReuseRates, Source
from foreword.core.tier import Tier

ALL = sys.maxsize


class Placement:
    """Of all tiers of one cache, whose device holds `num_blocks`."""

    name: str
    on_eviction = False  # whether blocks go down when the device evicts them

    def __init__(self, tiers: Sequence[Tier], num_blocks: int) -> None:
        self.tiers = tiers
        self.costs: Costs | None = None  # None: nothing is known of them

    def wanted(self, lease: Lease, sources: Sequence[Source]) -> list[int]:
        """How many leading blocks each tier is to have of a request that was just admitted, those
        that are yet to come too."""
        raise NotImplementedError

    def ended(self, lease: Lease) -> None:
        """The request is over, and its published blocks may be evicted."""

    def dropped(self, tier: int, hashes: Sequence[BlockHash]) -> None:
        """A tier made room for others."""


class WriteThrough(Placement):
    """All full blocks, as they are published."""

    name = "write-through"

    def wanted(self, lease: Lease, sources: Sequence[Source]) -> list[int]:
        return [ALL] * len(self.tiers)


class OnSecondUse(Placement):
    """What a request found: all others are for the device only."""

    name = "on-second-use"

    def wanted(self, lease: Lease, sources: Sequence[Source]) -> list[int]:
        return [sources[-1][2] if sources else 0] * len(self.tiers)


class WriteBack(Placement):
    """What the device evicts, and what it stands on."""

    name = "write-back"
    on_eviction = True

    def wanted(self, lease: Lease, sources: Sequence[Source]) -> list[int]:
        return [0] * len(self.tiers)


_Piece = tuple[int, int, Likeness]  # of a request's blocks: first and end of some that are alike
_FROM_START = (4, 32, 256)  # new blocks, where pieces end
_FROM_END = (8, 2, 0)
_USED, _ANSWER, _APPENDED = 1000, 1001, 2000  # names of pieces, beside their ends
_BESIDE = 0.1  # a second of a tier, which works beside the steps, in seconds of the device
_LEAST = 0.02  # likelihood of a use: a disk wears, which seconds do not say
_MAX_KINDS = 1024  # of requests


class Gain(Placement):
    """What is expected to save more seconds than it costs.

    A block that is not stored now can be at its next use, when the device has it or it was computed
    again. So storing it now gains the prefill of that use, if the device has lost it by then: as
    likely as for other blocks of its classes. It costs the tier's time, and what has to leave for
    it, which is as likely used again as what left so far. Before costs are known: write-through.
    """

    name = "gain"

    def __init__(self, tiers: Sequence[Tier], num_blocks: int) -> None:
        super().__init__(tiers, num_blocks)
        self._rates = ReuseRates(len(tiers), num_blocks)
        self._left = [Likeness((self._rates.counts(("left", at)),)) for at in range(len(tiers))]
        self._pieces: dict[Lease, list[_Piece]] = {}
        # By tenant, document and length: by the piece's name.
        self._kinds: dict[tuple[BlockHash, str, int], dict[int, Likeness]] = {}
        self._num_drops = 0

    def wanted(self, lease: Lease, sources: Sequence[Source]) -> list[int]:
        num_used = self._rates.used(lease.chain.hashes, sources) if lease.matched else 0
        pieces = self._pieces[lease] = self._split(lease, num_used)
        stable = lease.hints.num_stable_tokens
        if stable is not None:  # what comes after it goes down when it was used again
            return [max(num_used, stable // lease.chain.block_size)] * len(self.tiers)
        return [self._worth(lease, pieces, number) for number in range(len(self.tiers))]

    def ended(self, lease: Lease) -> None:
        hashes, stop = lease.chain.hashes, lease.num_published
        odd = hashes[-1][0] % 2 if hashes else 0  # half of them will do
        for first, end, alike in self._pieces.pop(lease)[odd::2]:
            if (size := min(end, stop) - first) > 0:
                # One stands for all; which one is by its hash, so that all places have a turn.
                self._rates.watch(hashes[first + hashes[first][0] % size], alike)
        self._rates.refused(hashes, min(lease.num_wanted), stop)
        self._rates.advance(stop - lease.num_reused_tokens // lease.chain.block_size)

    def dropped(self, tier: int, hashes: Sequence[BlockHash]) -> None:
        self._num_drops += 1
        if self._num_drops % 3 == 0:  # a sample will do
            self._rates.watch(hashes[self._num_drops % len(hashes)], self._left[tier])

    def _split(self, lease: Lease, num_used: int) -> list[_Piece]:
        """What was used before; what is new, by how far it is from both its ends; the answer."""
        stop = len(lease.chain.hashes)
        num_new = stop - num_used
        kind = (lease.chain.root, lease.hints.prompt_cache_key, num_new.bit_length() // 2)
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            known = self._kinds[kind] = {}
        ends = [(num_used + at, at) for at in _FROM_START if at < num_new - _FROM_END[0]]
        ends += [(stop - at, -at) for at in _FROM_END if at < num_new]
        offset = _APPENDED if num_used else 0
        first, pieces = 0, []
        for end, piece in ((num_used, _USED), *ends, (ALL, _ANSWER)):
            if end > first:
                name = piece + offset if end != num_used and end != ALL else piece
                alike = known.get(name)
                if alike is None:
                    alike = known[name] = self._alike(kind, name)
                pieces.append((first, end, alike))
                first = end
        return pieces

    def _alike(self, kind: tuple[BlockHash, str, int], name: int) -> Likeness:
        """From all new blocks to those of this tenant's document."""
        root, document, size = kind
        keys: list[Hashable] = [(name, size), (root, name), (root, name, document)]
        if name != _USED:  # that others are not used says nothing of one that was
            keys.insert(0, "new")
        return Likeness([self._rates.counts(key) for key in keys])

    def _worth(self, lease: Lease, pieces: Sequence[_Piece], number: int) -> int:
        """How many leading blocks have the greatest sum of gains in a tier, beyond those that it
        keeps already."""
        costs, tier = self.costs, self.tiers[number]
        if costs is None or costs.step is None:
            return ALL
        read = costs.tiers[number].cost
        wanted = kept = lease.num_stored[number]
        move_s = read.load_s(costs.block_bytes) - read.latency_s
        beside_s = _BESIDE * move_s
        is_full = tier.num_blocks >= tier.capacity
        victim = max(_LEAST, self._rates.rates(self._left[number], 0.0)[number] * is_full)
        gain_s = 0.0 if kept else -read.latency_s * self._rates.rates(pieces[0][2])[number]
        most_s = 0.0
        for start, stop, alike in pieces:
            first = max(start, kept)
            if first >= stop or (stop == ALL and wanted < start):
                continue  # an answer that may be none is no reason to keep its prompt
            count = 1 if stop == ALL else stop - first
            prefill_s = costs.block_s(first + count // 2)
            saved_s = prefill_s - beside_s if prefill_s > move_s else 0.0
            gain_s += count * ((self._rates.rates(alike)[number] - victim) * saved_s - beside_s)
            if gain_s > most_s:
                most_s, wanted = gain_s, stop
        return wanted


PLACEMENTS: dict[str, type[Placement]] = {
    made.name: made for made in (Gain, WriteThrough, OnSecondUse, WriteBack)
}
