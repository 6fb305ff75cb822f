"""PagedKV: the device's pool of keys and values, and the transformers Cache that writes to it."""

import inspect
import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

# Attention reads keys in tiles of this many tokens and may read past a sequence's end (masked).
TILE = 512
HUGE_PAGE = 2 << 20  # bytes
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
        shapes = [
            (slots, layer.num_kv_heads, size)
            for layer in layers
            for size in (layer.key_size, layer.value_size)
        ]
        if device.type == "cpu":
            pools = _lazy_zeros(shapes, dtype)
        else:
            pools = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.keys, self.values = pools[::2], pools[1::2]
        self._groups = list(self._grouped()) if device.type == "cpu" else []

    def copy(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of block `src` into block `dst`, in every layer."""
        assert 0 < num_tokens <= self.block_size
        from_slot, to_slot = src * self.block_size, dst * self.block_size
        for pool in (*self.keys, *self.values):
            pool[to_slot : to_slot + num_tokens] = pool[from_slot : from_slot + num_tokens]

    def read_blocks(self, block_ids: Sequence[int], out: Tensor) -> None:
        """Copy whole blocks to rows of `out` [blocks, elements of one block], in main memory: for
        each layer the keys, then the values, as the Identity's layout says."""
        if out.device != self.keys[0].device:
            rows = torch.empty(out.shape, dtype=out.dtype, device=self.keys[0].device)
            ids = torch.tensor(block_ids, device=rows.device)
            for pool, columns in self._columns():
                rows[:, columns] = pool[ids]
            _copy_rows(rows, out)
            return
        target = _words(out)
        for source, columns in self._groups:
            places = target[:, columns].reshape(len(target), len(source), -1)
            for at, run in _runs(block_ids):
                places[at : at + len(run)] = source[:, run.start : run.stop].transpose(1, 0, 2)

    def write_blocks(self, block_ids: Sequence[int], rows: Sequence[memoryview]) -> None:
        """Copy rows as `read_blocks` made them, each in main memory, into whole blocks."""
        if not self._groups:
            dtype, device = self.keys[0].dtype, self.keys[0].device
            found = [torch.frombuffer(row, dtype=dtype) for row in rows]
            near = torch.empty((len(found), len(found[0])), dtype=dtype, device=device)
            _copy_rows(found, near)
            ids = torch.tensor(block_ids, device=near.device)
            for pool, columns in self._columns():
                pool.index_copy_(0, ids, near[:, columns])
            return
        for target, columns in self._groups:
            for block_id, row in zip(block_ids, rows, strict=True):
                words = np.frombuffer(row, target.dtype)[columns]
                target[:, block_id] = words.reshape(len(target), -1)

    def _grouped(self) -> Iterator[tuple[NDArray[Any], slice]]:
        """For numpy on the CPU, pools that are alike together, [pools, blocks, elements], and where
        a row has them: one copy of all takes a tenth of the time of one for each."""
        pools = [(_words(pool), columns) for pool, columns in self._columns()]
        if len({pool.shape for pool, _ in pools}) > 1:
            yield from ((pool[None], columns) for pool, columns in pools)
            return
        first, pitch = pools[0][0], pools[1][0].ctypes.data - pools[0][0].ctypes.data
        together = as_strided(first, (len(pools), *first.shape), (pitch, *first.strides))
        yield together, slice(0, pools[-1][1].stop)

    def _columns(self) -> Iterator[tuple[Tensor, slice]]:
        """Each layer's keys and values as [blocks, elements], and where a row has them."""
        start = 0
        for pair in zip(self.keys, self.values, strict=True):
            for pool in pair:
                blocks = pool.view(len(pool) // self.block_size, -1)
                yield blocks, slice(start, start := start + blocks.shape[1])


def _lazy_zeros(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> list[Tensor]:
    """Zeros in one piece of memory, a fixed distance apart where they are alike. torch.zeros would
    write them all, and take the memory before anything is cached."""
    ends = [0]
    for shape in shapes:
        ends.append(ends[-1] + -(-math.prod(shape) * dtype.itemsize // HUGE_PAGE) * HUGE_PAGE)
    pages = mmap.mmap(-1, ends[-1])
    if hasattr(mmap, "MADV_HUGEPAGE"):  # where the system has large pages for shared memory
        pages.madvise(mmap.MADV_HUGEPAGE)
    return [
        torch.frombuffer(pages, dtype=dtype, offset=start, count=math.prod(shape)).view(shape)
        for start, shape in zip(ends, shapes, strict=False)
    ]


def _words(tensor: Tensor) -> NDArray[Any]:
    """The same memory for numpy, which does not know bfloat16."""
    size = tensor.dtype.itemsize
    words: NDArray[Any] = tensor.view({2: torch.int16, 4: torch.int32}[size]).numpy()
    return words


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Neighbours together: where in `block_ids` a run starts, and its blocks."""
    start = 0
    for at in range(1, len(block_ids) + 1):
        if at == len(block_ids) or block_ids[at] != block_ids[at - 1] + 1:
            yield start, range(block_ids[start], block_ids[at - 1] + 1)
            start = at


def _copy_rows(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
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
