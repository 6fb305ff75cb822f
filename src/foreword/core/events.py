"""KV events: what became reusable and what stopped being so, as vLLM publishes them.

Only full blocks have events: a partial block has no hash. `medium` is where the blocks are, in the
engine's word ("GPU", "CPU", "DISK"), and `group` the part of a model whose layers cache in several
ways: a block may be in several of both, and leaves each by an event of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreword.core.block import BlockHash

DEVICE = "GPU"  # the medium of what an engine can attend to, whatever the device is


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one chain. `parent_block_hash` is None where the chain starts;
    `token_ids` are those of all the blocks, `block_size` each. Other engines send none of them for
    blocks that only change their medium."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = DEVICE
    group: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that no later request can reuse from here."""

    block_hashes: tuple[BlockHash, ...]
    medium: str = DEVICE
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
Publish = Callable[[Sequence[KVEvent]], None]
