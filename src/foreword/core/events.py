"""KV events: what became reusable and what stopped being so, as vLLM publishes them.

Only full blocks have events: a partial block has no hash.
"""

from dataclasses import dataclass

from foreword.core.block import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one chain. `parent_block_hash` is None where the chain starts;
    `token_ids` are those of all the blocks, `block_size` each."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that no later request can reuse from here."""

    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
