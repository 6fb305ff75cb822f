"""PagedKV: the device's pool of keys and values, and the transformers Cache that writes to it."""

import inspect
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

# Attention reads keys in tiles of this many tokens and may read past a sequence's end (masked).
TILE = 512
# Slots after the last block, which stay zero. A batch of decodes reads for each as many keys as for
# the longest, which may end a tile later than the first and it two tiles later than the shortest;
# then the width is rounded up.
_GUARD = 3 * TILE


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one token in one layer, and how far back the layer looks (None: all the way)."""

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None


class PagedKV:
    """`num_blocks` blocks of `block_size` token slots, in each layer one tensor for keys and one
    for values, [slots, kv heads, head size]. Memory is touched only where blocks are written."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = tuple(layers)
        self.spare_block = num_blocks  # stays zero; pads gathered block tables
        slots = (num_blocks + -(-_GUARD // block_size) + 1) * block_size

        def pool(num_heads: int, size: int) -> Tensor:
            if device.type != "cpu":
                return torch.zeros(slots, num_heads, size, dtype=dtype, device=device)
            # torch.zeros would write them all, and take the memory before anything is cached.
            pages = mmap.mmap(-1, slots * num_heads * size * dtype.itemsize)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # a decode after 3,000 tokens takes 0.94 of the time
                pages.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(pages, dtype=dtype).view(slots, num_heads, size)

        self.keys = [pool(layer.num_kv_heads, layer.key_size) for layer in layers]
        self.values = [pool(layer.num_kv_heads, layer.value_size) for layer in layers]

    def copy(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of block `src` into block `dst`, in every layer."""
        assert 0 < num_tokens <= self.block_size
        from_slot, to_slot = src * self.block_size, dst * self.block_size
        for pool in (*self.keys, *self.values):
            pool[to_slot : to_slot + num_tokens] = pool[from_slot : from_slot + num_tokens]

    def read_blocks(self, block_ids: Sequence[int], out: Tensor) -> None:
        """Copy whole blocks to rows of `out` [blocks, elements of one block], in main memory: for
        each layer the keys, then the values, as the Identity's layout says."""
        ids = torch.tensor(block_ids, device=self.keys[0].device)
        rows = out if ids.device == out.device else torch.empty_like(out, device=ids.device)
        for pool, columns in self._columns():
            rows[:, columns] = pool[ids]
        if rows is not out:
            _copy_rows(rows, out)

    def write_blocks(self, block_ids: Sequence[int], rows: Tensor) -> None:
        """Copy rows as `read_blocks` made them into whole blocks."""
        ids = torch.tensor(block_ids, device=self.keys[0].device)
        if ids.device != rows.device:
            near = torch.empty(rows.shape, dtype=rows.dtype, device=ids.device)
            _copy_rows(rows, near)
            rows = near
        for pool, columns in self._columns():
            pool.index_copy_(0, ids, rows[:, columns])

    def _columns(self) -> Iterator[tuple[Tensor, slice]]:
        """Each layer's keys and values as [blocks, elements], and where a row has them."""
        start = 0
        for pair in zip(self.keys, self.values, strict=True):
            for pool in pair:
                blocks = pool.view(len(pool) // self.block_size, -1)
                yield blocks, slice(start, start := start + blocks.shape[1])


def _copy_rows(source: Tensor, target: Tensor) -> None:
    """Between device and pinned memory: row by row, since only what lies in one piece goes without
    a copy on the way. Done when it returns."""
    for row, place in zip(source, target, strict=True):
        place.copy_(row, non_blocking=True)
    torch.cuda.synchronize()


def block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    per_token = sum(x.num_kv_heads * (x.key_size + x.value_size) for x in layers)
    return per_token * block_size * dtype.itemsize


class PagedCache(Cache):
    """Writes one step's new keys and values to the pool's slots; attention reads them there."""

    is_compileable = False

    def __init__(self, kv: PagedKV, slots: Tensor) -> None:
        self.layers = []  # the library keeps per-layer state here; ours is the pool
        self.kv = kv
        self.slots = slots  # of this step's tokens, in row order

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as [1, kv heads, tokens, head size]; passed through."""
        self.kv.keys[layer_idx].index_copy_(0, self.slots, key_states[0].transpose(0, 1))
        self.kv.values[layer_idx].index_copy_(0, self.slots, value_states[0].transpose(0, 1))
        return key_states, value_states


def cache_argument(module: Any) -> str:
    """What the model's forward calls its cache: renamed in transformers 5.24."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
