"""Staging: where KV waits between the device's pool and a store.

Stores read and write here, never in the pool, so that a late or damaged read can spoil nothing.
Only what a store lends is copied from where it lies.
"""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from foreword.engine.kv import PagedKV, block_bytes
from foreword.store.codec import kv_offset, record_bytes
from foreword.store.pages import arena, whole_pages

CELL_BYTES = 2 << 20  # of one read or write: many small ones are what makes SSDs slow


class Staging:
    """About `num_bytes` in cells of a few records each. Cells may be taken and given back by any
    thread; memory is touched as they are used."""

    def __init__(self, kv: PagedKV, num_bytes: int) -> None:
        dtype = kv.keys[0].dtype
        kv_bytes = block_bytes(kv.layers, kv.block_size, dtype)
        self.record_bytes = record_bytes(kv.block_size, kv_bytes)
        self.slot_bytes = whole_pages(self.record_bytes)
        self.cell_blocks = max(1, CELL_BYTES // self.slot_bytes)
        self.num_cells = max(2, num_bytes // (self.cell_blocks * self.slot_bytes))
        num_slots = self.num_cells * self.cell_blocks
        if kv.keys[0].device.type == "cuda":
            raw = torch.empty(num_slots * self.slot_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            pages = arena(num_slots * self.slot_bytes)
            raw = torch.from_numpy(np.frombuffer(pages, np.uint8))
        self._bytes = raw.numpy().data
        first = kv_offset(kv.block_size) // dtype.itemsize
        rows = raw.view(dtype).view(num_slots, self.slot_bytes // dtype.itemsize)
        self._rows = rows[:, first : first + kv_bytes // dtype.itemsize]
        self._free = deque(range(self.num_cells))

    def take(self) -> int | None:
        """A free cell, or None."""
        try:
            return self._free.pop()  # the one used last: its memory is there already
        except IndexError:
            return None

    def give(self, cell: int) -> None:
        self._free.append(cell)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def slots(self, cell: int, num_blocks: int) -> list[memoryview]:
        """The first buffers of a cell, each of `slot_bytes`."""
        start = cell * self.cell_blocks
        return [
            self._bytes[at * self.slot_bytes : (at + 1) * self.slot_bytes]
            for at in range(start, start + num_blocks)
        ]

    def rows(self, cell: int, num_blocks: int) -> Tensor:
        """The KV in them, [blocks, elements of one block]."""
        start = cell * self.cell_blocks
        return self._rows[start : start + num_blocks]
