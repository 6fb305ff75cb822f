"""WorkerShape: what a worker in virtual time has room for, and what its work costs."""

from dataclasses import dataclass, replace

from foreword.core.cost import StepCost, TierCost
from foreword.core.place import Placement, WriteThrough
from foreword.core.policies import DEFAULT
from foreword.core.policy import Policy
from foreword.core.waiting import LONGEST_PREFIX

STUCK_S = 0.05  # as engine.lane has it


@dataclass(frozen=True, slots=True)
class Reading:
    """How a tier is read: in pieces of about `cell_bytes`, `num_readers` at once and up to
    `most_readers` with those that are stuck; `num_cells` can be under way. Of the pieces a share
    stalls, each for some time of `stall_s`, in the order of magnitude evenly drawn. With `gives_up`
    what is late is given up as the engine does, and the tier left alone for a while."""

    num_readers: int = 1
    most_readers: int = 1
    cell_bytes: int = 1 << 60
    num_cells: int = 1 << 60
    stall_share: float = 0.0
    stall_s: tuple[float, float] = (0.1, 10.0)
    gives_up: bool = False
    from_front: bool = False  # a load's first blocks first


@dataclass(frozen=True, slots=True)
class TierRoom:
    """A tier below the device: how many blocks it holds and what it takes to read them, which may
    be something else from some times on. One that is `shared` is asked what others have of each
    prompt, of whom there are none here."""

    name: str
    num_blocks: int
    cost: TierCost
    shared: bool = False
    reading: Reading = Reading()
    later: tuple[tuple[float, TierCost], ...] = ()  # from when on, ascending

    def cost_at(self, now_s: float) -> TierCost:
        """What a read costs that begins now."""
        return next((cost for from_s, cost in reversed(self.later) if from_s <= now_s), self.cost)


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
    seed: int = 0  # of what its tiers do at random
    # What plans go by until steps and reads say more; None: all that tiers have is loaded.
    expected: tuple[StepCost | None, TierCost] | None = None

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
