"""Pins: prompts that stay in the device, whatever else is wanted, until they are unpinned."""

from foreword.core.block import BlockHash, BlockId, Chain
from foreword.core.errors import PinsFull
from foreword.core.index import RadixIndex
from foreword.core.pool import BlockPool


class Pins:
    """Of up to `most` blocks of a pool, which count as leased."""

    def __init__(self, pool: BlockPool, most: int) -> None:
        self.most = most
        self._pool = pool
        self.held: dict[BlockHash, list[BlockId]] = {}  # by the last hash of what is pinned

    def pin(self, index: RadixIndex, chain: Chain) -> int:
        """Pin what the index has of a chain's full blocks; returns how many. Raises PinsFull."""
        root, hashes = index.root(chain.root), chain.hashes
        _, block_ids = index.walk(root, hashes, 0, len(hashes))
        if not block_ids or (last := hashes[len(block_ids) - 1]) in self.held:
            return len(block_ids)
        num_blocks = len(set(block_ids).union(*self.held.values()))
        if num_blocks > self.most:
            raise PinsFull(
                f"{num_blocks} blocks would be pinned, and {self.most} of the device's "
                f"{self._pool.num_blocks} may be: unpin others, or pin less"
            )
        self._pool.pin(block_ids)
        self.held[last] = block_ids
        return len(block_ids)

    def unpin(self, chain: Chain) -> bool:
        """End the pin of a chain, or of as much of it as there was. False: there was none."""
        for block_hash in reversed(chain.hashes):
            if block_ids := self.held.pop(block_hash, None):
                self._pool.unpin(block_ids)
                return True
        return False
