"""WorkerShape: what a worker in virtual time has room for, and what its work costs."""

from dataclasses import dataclass, replace

from foreword.core.cost import StepCost, TierCost
from foreword.core.place import Placement, WriteThrough
from foreword.core.policies import DEFAULT
from foreword.core.policy import Policy
from foreword.core.waiting import LONGEST_PREFIX


@dataclass(frozen=True, slots=True)
class TierRoom:
    """A tier below the device: how many blocks it holds and what it takes to read them. One that is
    `shared` is asked what others have of each prompt, of whom there are none here."""

    name: str
    num_blocks: int
    cost: TierCost
    shared: bool = False


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What a worker has room for and what its work costs. A block is of `block_size` tokens, or of
    one id where a trace has ids of blocks, and of `block_bytes`."""

    num_blocks: int
    cost: StepCost
    block_size: int = 16
    block_bytes: int = 0
    tiers: tuple[TierRoom, ...] = ()  # the fastest first
    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    max_prefill_tokens: int = 2048
    reuse: bool = True
    policy: Policy = DEFAULT
    order: str = LONGEST_PREFIX
    placement: type[Placement] = WriteThrough

    def of_blocks(self, num_tokens: int) -> "WorkerShape":
        """The same worker with blocks of so many tokens."""
        if num_tokens == self.block_size:
            return self
        size = self.block_size
        tiers = (
            replace(room, num_blocks=room.num_blocks * size // num_tokens) for room in self.tiers
        )
        return replace(
            self,
            num_blocks=self.num_blocks * size // num_tokens,
            block_size=num_tokens,
            block_bytes=self.block_bytes * num_tokens // size,
            tiers=tuple(tiers),
        )
