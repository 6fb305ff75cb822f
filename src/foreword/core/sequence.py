"""Sequence: one sample of a request on its way through the scheduler. Who drives it adds what a
sample is there: in the engine its text and how it is drawn, in a simulation what the trace says.
"""

from typing import Self

from foreword.core.block import BlockHash, Chain
from foreword.core.lease import Lease
from foreword.core.request import NO_HINTS

_MAX_LOGITS = 256  # rows of a step for one sequence; each is as wide as the vocabulary


class Sequence:
    """`chain` holds the prompt, then what was sampled. The newest sampled token has no KV yet."""

    def __init__(self, chain: Chain, index: int = 0, *, wants_prompt: bool = False) -> None:
        """Sample `index` of a request, whose prompt `chain` holds. Of several the first computes
        it; with `wants_prompt` it computes all of it, for its logits, and reuses nothing."""
        self.chain = chain
        self.index = index
        self.num_prompt_tokens = len(chain)
        self.shares_chain = index > 0  # with other samples, which grow in other ways
        self.arrival = 0  # order of admission; the youngest is preempted first
        self.hints = NO_HINTS
        self.lease: Lease | None = None
        self.siblings: list[Self] = []  # samples that start when the prompt is computed
        self.num_probes = 0  # that tiers have not answered yet
        self.elsewhere: dict[int, int] = {}  # what they answered: leading blocks by tier
        self.num_cached_tokens: int | None = None  # of the prompt: what nobody computed for it
        self.restored: dict[int, int] = {}  # of these, tokens by tier
        self._wants_prompt = wants_prompt
        self._behind: tuple[Lease, BlockHash | None] | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.chain) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        assert self.lease is not None
        return len(self.chain) - self.lease.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_sampled > 0 and self.num_uncomputed == 1

    @property
    def reports_prompt(self) -> bool:
        """Whether logits of all its prompt are wanted still."""
        return self._wants_prompt and self.index == 0 and self.num_sampled == 0

    @property
    def is_held(self) -> bool:
        """Whether it cannot be admitted yet: a tier has not answered, or the lease that it follows
        has not come further."""
        behind = self._behind
        return self.num_probes > 0 or (behind is not None and behind[0].leads is behind[1])

    def follow(self, leader: Lease | None) -> None:
        """Wait for the block that `leader` computes now."""
        self._behind = None if leader is None else (leader, leader.leads)

    def take_chain(self) -> None:
        """Before it runs: from here on its chain is its own."""
        if self.shares_chain:
            self.chain, self.shares_chain = self.chain.copy(), False

    def note_reuse(self) -> None:
        """Keep what the first lease reused: a later one reuses what was computed under it."""
        assert self.lease is not None
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self.lease.num_reused_tokens
            self.restored = dict(self.lease.restored)

    def chunk(self, budget: int, num_left: int) -> int:
        """How many of the tokens that are left to compute next, within a budget."""
        return min(budget, num_left, _MAX_LOGITS if self.reports_prompt else budget)
