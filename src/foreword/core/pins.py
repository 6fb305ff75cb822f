"""Pins: prompts that stay in the device, whatever else is wanted, until they are unpinned."""

from foreword.core.block import BlockHash, BlockId
from foreword.core.errors import PinsFull
from foreword.core.pool import BlockPool


class Pins:
    """Of up to `most` blocks of a pool, which count as leased."""

    def __init__(self, pool: BlockPool, most: int) -> None:
        self.most = most
        self._pool = pool
        self.held: dict[BlockHash, list[BlockId]] = {}  # by the last hash of what is pinned

    def pin(self, last: BlockHash, block_ids: list[BlockId]) -> None:
        """Pin cached blocks from a root on, the last of which is `last`. Raises PinsFull."""
        if last in self.held:
            return
        num_blocks = len(set(block_ids).union(*self.held.values()))
        if num_blocks > self.most:
            raise PinsFull(
                f"{num_blocks} blocks would be pinned, and {self.most} of the device's "
                f"{self._pool.num_blocks} may be: unpin others, or pin less"
            )
        self._pool.pin(block_ids)
        self.held[last] = block_ids

    def unpin(self, last: BlockHash) -> bool:
        """False: it was not pinned."""
        block_ids = self.held.pop(last, [])
        self._pool.unpin(block_ids)
        return bool(block_ids)
