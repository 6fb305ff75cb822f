"""BlockPool: the device's fixed slots, each leased, idle (cached, evictable) or blank.

Idle counts as free: caching never takes memory from running requests. The pool owns the pins; it
does not know which prefix a block belongs to.
"""

from collections.abc import Iterable, Sequence

from foreword.core.block import BlockId


class BlockPool:
    """`num_blocks` slots, ids 0 to num_blocks - 1, all blank at first."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.pins = [0] * num_blocks
        self.cached = bytearray(num_blocks)
        self.num_idle = 0
        # A stack whose top is the lowest id: neighbours in a sequence get neighbouring slots,
        # which lets attention read them in place.
        self._blank = [BlockId(i) for i in reversed(range(num_blocks))]

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_free(self) -> int:
        """Slots that a new lease can have, after eviction where needed."""
        return len(self._blank) + self.num_idle

    @property
    def num_leased(self) -> int:
        return self.num_blocks - self.num_free

    def take(self, num_blocks: int) -> list[BlockId]:
        """Pin blank slots, in ascending order where they lie together."""
        assert 0 <= num_blocks <= len(self._blank), "evict before taking"
        start = len(self._blank) - num_blocks
        taken = self._blank[start:]
        del self._blank[start:]
        taken.reverse()
        for block_id in taken:
            self.pins[block_id] = 1
        return taken

    def pin(self, block_ids: Iterable[BlockId]) -> None:
        """Lease cached slots once more each."""
        pins = self.pins
        for block_id in block_ids:
            if pins[block_id] == 0:
                assert self.cached[block_id], "only a cached slot can be leased again"
                self.num_idle -= 1
            pins[block_id] += 1

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """End one lease of each slot; what nobody leases becomes idle or blank."""
        pins, cached, blank = self.pins, self.cached, []
        for block_id in block_ids:
            count = pins[block_id] - 1
            assert count >= 0, "unpinned more often than pinned"
            pins[block_id] = count
            if count == 0:
                if cached[block_id]:
                    self.num_idle += 1
                else:
                    blank.append(block_id)
        blank.reverse()
        self._blank += blank

    def keep(self, block_ids: Iterable[BlockId]) -> None:
        """Leased slots became cached: they will be idle, not blank, when unpinned."""
        for block_id in block_ids:
            assert self.pins[block_id] > 0, "only a leased slot can become cached"
            self.cached[block_id] = 1

    def drop(self, block_ids: Sequence[BlockId]) -> None:
        """Slots left the cache: blank now, or when their last lease ends."""
        for block_id in reversed(block_ids):
            assert self.cached[block_id], "only a cached slot can be dropped"
            self.cached[block_id] = 0
            if self.pins[block_id] == 0:
                self.num_idle -= 1
                self._blank.append(block_id)

    def num_idle_at_end(self, block_ids: Sequence[BlockId], limit: int) -> int:
        """How many slots are unpinned, from the end to the first pin or to `limit`."""
        pins = self.pins
        for count, block_id in enumerate(reversed(block_ids)):
            if count == limit or pins[block_id]:
                return count
        return len(block_ids)
