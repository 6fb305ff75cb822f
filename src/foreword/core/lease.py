"""Lease: a request's blocks; and the effects by which they are filled and kept.

The core only says what is to be done. Its driver does it and tells what came of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from foreword.core.block import BlockHash, BlockId, Chain
from foreword.core.index import Node
from foreword.core.plan import RestorePlan
from foreword.core.request import NO_HINTS, Hints


class BlockState(IntEnum):
    """What a leased block holds for its lease."""

    BLANK = 0  # nothing yet, or not all of its tokens
    LOADING = 1  # an effect will fill its first tokens
    READY = 2  # all of its tokens


@dataclass(frozen=True, slots=True)
class Copy:
    """Effect: copy the KV of the first `num_tokens` tokens of slot `source` to slot `target`."""

    source: BlockId
    target: BlockId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Effect: read blocks `start` to `stop` of the lease's chain from a tier, the last ones first.
    Each that the lease awaits is to be told loaded, once its KV is in the lease's slot, or lost. Of
    a `probe` it awaits none: it is read for the time that it takes."""

    lease: "Lease"
    tier: int
    start: int
    stop: int
    probe: bool = False

    def awaits(self, at: int) -> bool:
        """Whether block `at` is to be filled by it still."""
        lease = self.lease
        return not (self.probe or lease.released) and lease.states[at] == BlockState.LOADING


@dataclass(frozen=True, slots=True)
class Store:
    """Effect: write blocks of `chain` from block `start` on to a tier. Their KV is in `block_ids`
    until the next step writes: copy it out before."""

    tier: int
    chain: Chain
    start: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Effect: let a tier forget these blocks, after the stores and before those that follow."""

    tier: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Effect: ask a tier how many blocks of `chain`, from block `start` on, it has of anybody's."""

    tier: int
    chain: Chain
    start: int


@dataclass(slots=True, eq=False)
class Lease:
    """A request's pinned blocks, in prefix order, until released.

    `num_computed_tokens` leading tokens hold valid KV. `num_published` leading blocks can be found
    by others and end at the index node `end` (None: at the root). Of `num_reused_tokens`, which
    nobody computed for it, `restored` came from tiers, by tier. What is loading is late from
    `late_at_s` on.
    """

    chain: Chain
    block_ids: list[BlockId]
    states: bytearray  # a BlockState per block
    num_reused_tokens: int
    num_computed_tokens: int
    num_published: int
    end: Node | None
    restored: dict[int, int] = field(default_factory=dict)
    elsewhere: Mapping[int, int] = field(default_factory=dict)  # leading blocks, by tier, of others
    num_stored: dict[int, int] = field(default_factory=dict)  # leading blocks that a tier kept
    plan: RestorePlan | None = None
    admitted_s: float = 0.0
    late_at_s: float = inf
    num_waits: int = 0  # for what was late
    num_wanted: list[int] = field(default_factory=list)  # and that each is to keep
    hints: Hints = NO_HINTS
    matched: bool = True  # False: it reuses nothing, whatever is known
    waited_s: dict[int, float] = field(default_factory=dict)  # with nothing to compute, by tier
    waits: tuple[int, float] | None = None  # for that tier, since then
    copy: Copy | None = None
    leads: BlockHash | None = None  # the block that others wait for
    released: bool = False

    def wait(self, at: int, now_s: float) -> None:
        """It can compute nothing before block `at` comes; with -1 it can."""
        if self.waits is not None:
            tier, since_s = self.waits
            self.waited_s[tier] = self.waited_s.get(tier, 0.0) + now_s - since_s
            self.waits = None
        if at >= 0 and self.plan is not None:
            tier = next(tier for tier, start, stop in self.plan.loads if start <= at < stop)
            self.waits = (tier, now_s)

    def take_back(self) -> None:
        """Await no more loads: their blocks will be computed."""
        self.states = self.states.replace(bytes([BlockState.LOADING]), bytes([BlockState.BLANK]))
        self.late_at_s = inf
