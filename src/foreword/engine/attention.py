"""Attention of one packed step over the paged pool: many sequences, prefill and decode mixed.

transformers calls `paged_attention` once per layer; what it must know of the step, where keys lie
and what each row may see, is built once per step in a `Step`.

Whatever is rounded up here (query rows to a multiple of 4, keys to a width) makes the result of a
row independent of the rows and keys computed beside it, bit for bit. That costs so little that it
is always done; exact.py measures which widths are safe on this machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from foreword.engine.kv import TILE, PagedKV

IMPLEMENTATION = "foreword_paged"
ANY_WIDTH = tuple(range(16, TILE + 1, 16))  # of the last key tile in decode; exact mode allows less
_ROWS = 4  # with fewer query rows in a block the kernels take another path
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Part:
    """What one sequence computes in a step."""

    block_ids: Sequence[int]  # its block table in prefix order, to the last new token or further
    start: int  # tokens whose KV is in the pool already
    token_ids: Sequence[int]  # the new ones, at least one
    wants_logits: bool  # of the last token

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the keys of `count` sequences lie: a view of the pool if each has consecutive blocks
    and they start equally far apart, else (one sequence) a gather of `blocks`."""

    num_keys: int
    first: int = 0  # slot
    apart: int = 0  # slots
    count: int = 1
    blocks: Tensor | None = None

    def read(self, pool: Tensor, block_size: int) -> Tensor:
        """[count, kv heads, num_keys, head size] out of [slots, kv heads, head size]."""
        slots, heads, size = pool.shape
        if self.blocks is not None:
            blocks = pool.view(slots // block_size, -1).index_select(0, self.blocks)
            return blocks.view(1, -1, heads, size)[:, : self.num_keys].transpose(1, 2)
        row = heads * size
        shape = (self.count, heads, self.num_keys, size)
        return pool.as_strided(shape, (self.apart * row, size, row, 1), self.first * row)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows start to stop of one prefill, which see `num_keys` keys; no mask means plain causal."""

    start: int
    stop: int
    num_keys: int
    mask: Tensor | None


@dataclass(slots=True)
class _Decodes:
    """Sequences with one new token whose attention is one call: rows start to start + count."""

    start: int
    ends: list[int]
    keys: Keys


class Step:
    """One packed forward. `order` says which part each run of rows belongs to: parts that decode
    come first, so that neighbours in the pool are neighbours in the batch."""

    def __init__(
        self, kv: PagedKV, parts: Sequence[Part], last_widths: Sequence[int] = ANY_WIDTH
    ) -> None:
        self.kv = kv
        self._dtype, self._device = kv.keys[0].dtype, kv.keys[0].device
        self._last_widths = last_widths
        tables = [self._table(part) for part in parts]
        firsts = [_first_of_run(table) for table in tables]
        self.order = sorted(
            range(len(parts)), key=lambda i: (len(parts[i].token_ids) > 1, firsts[i])
        )
        slots, self._decodes = [], list[_Decodes]()
        self._prefills: list[tuple[int, Part, Keys]] = []
        row = 0
        for i in self.order:
            part, table, first = parts[i], tables[i], firsts[i] * kv.block_size
            positions = np.arange(part.start, part.end)
            slots.append(
                table[positions // kv.block_size] * kv.block_size + positions % kv.block_size
            )
            if len(part.token_ids) > 1:
                self._prefills.append((row, part, self._keys(table, first, _up(part.end, TILE))))
            else:
                keys = self._keys(table, first, self._width(part.end))
                if not (self._decodes and _join(self._decodes[-1], part.end, keys)):
                    self._decodes.append(_Decodes(row, [part.end], keys))
            row += len(part.token_ids)
        self.slots = torch.from_numpy(np.concatenate(slots)).to(self._device)
        self._num_decodes = sum(len(group.ends) for group in self._decodes)
        self._built: dict[int | None, tuple[list[Tensor | None], list[list[Piece]]]] = {}

    def attend(self, layer: int, query: Tensor, scaling: float | None) -> Tensor:
        """Attention of query [1, heads, rows, size]: [rows, heads, value size]."""
        keys, values, block_size = self.kv.keys[layer], self.kv.values[layer], self.kv.block_size
        masks, pieces = self._plan(self.kv.layers[layer].window)
        out = query.new_empty(query.shape[2], query.shape[1], values.shape[2])
        if self._decodes:
            packed = self._pack(query, keys.shape[1])
            group = query.shape[1] // keys.shape[1]
            for decodes, mask in zip(self._decodes, masks, strict=True):
                rows = slice(decodes.start, decodes.start + len(decodes.ends))
                result = functional.scaled_dot_product_attention(
                    packed[rows],
                    decodes.keys.read(keys, block_size),
                    decodes.keys.read(values, block_size),
                    attn_mask=mask,
                    scale=scaling,
                )
                out[rows].view(len(decodes.ends), keys.shape[1], group, -1)[:] = result[
                    :, :, :group
                ]
        for (first, _part, where), cut in zip(self._prefills, pieces, strict=True):
            key, value = where.read(keys, block_size), where.read(values, block_size)
            for piece in cut:
                rows = slice(first + piece.start, first + piece.stop)
                out[rows] = _prefill(query[:, :, rows], key, value, piece, scaling)
        return out

    def _pack(self, query: Tensor, num_kv_heads: int) -> Tensor:
        """Decode rows with the heads that share a KV head as query rows, padded with zero rows:
        [sequences, kv heads, rows, size]. One unpadded row costs several times as much."""
        num, size = self._num_decodes, query.shape[3]
        group = query.shape[1] // num_kv_heads
        rows = query[0, :, :num].transpose(0, 1).reshape(num, num_kv_heads, group, size)
        return functional.pad(rows, (0, 0, 0, -group % _ROWS))

    def _table(self, part: Part) -> np.ndarray:
        num_blocks = -(-part.end // self.kv.block_size)
        table = np.asarray(part.block_ids[:num_blocks], dtype=np.int64)
        assert len(table) == num_blocks > 0, "the block table is too short"
        return table

    def _width(self, num_tokens: int) -> int:
        whole, rest = num_tokens // TILE * TILE, num_tokens % TILE
        return whole + (next(w for w in self._last_widths if w >= rest) if rest else 0)

    def _keys(self, table: np.ndarray, first: int, num_keys: int) -> Keys:
        if first >= 0:
            return Keys(num_keys, first)
        spare = -(-num_keys // self.kv.block_size) - len(table)
        blocks = np.pad(table, (0, spare), constant_values=self.kv.spare_block)
        return Keys(num_keys, blocks=torch.from_numpy(blocks).to(self._device))

    def _plan(self, window: int | None) -> tuple[list[Tensor | None], list[list[Piece]]]:
        plan = self._built.get(window)
        if plan is None:
            masks = [self._decode_mask(decodes, window) for decodes in self._decodes]
            pieces = [self._pieces(part, window) for _row, part, _keys in self._prefills]
            plan = self._built[window] = masks, pieces
        return plan

    def _decode_mask(self, decodes: _Decodes, window: int | None) -> Tensor | None:
        num_keys = decodes.keys.num_keys
        if window is None and all(end == num_keys for end in decodes.ends):
            return None
        mask = torch.zeros(len(decodes.ends), 1, 1, num_keys, dtype=self._dtype)
        for row, end in zip(mask, decodes.ends, strict=True):
            row[..., end:] = _NEVER
            if window is not None and end > window:
                row[..., : end - window] = _NEVER
        return mask.to(self._device)

    def _pieces(self, part: Part, window: int | None) -> list[Piece]:
        num = len(part.token_ids)
        if part.start == 0 and (window is None or num <= window):
            return [Piece(0, num, _up(num, TILE), None)]
        pieces, start = [], 0
        while start < num:  # cut where the last key tile changes: what is above is never computed
            first = part.start + start
            stop = min(num, first // TILE * TILE + TILE - part.start)
            num_keys = _up(part.start + stop, TILE)
            mask = torch.full(
                (_up(stop - start, _ROWS), num_keys), _NEVER, dtype=self._dtype, device=self._device
            )
            if window is not None:
                mask = mask.triu(first + 1) + mask.tril(first - window)
            else:
                mask.triu_(first + 1)
            pieces.append(Piece(start, stop, num_keys, mask))
            start = stop
        return pieces


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, piece: Piece, scaling: float | None
) -> Tensor:
    """Query [1, heads, rows, size] to [rows, heads, value size]."""
    num = query.shape[2]
    result = functional.scaled_dot_product_attention(
        functional.pad(query, (0, 0, 0, -num % _ROWS)),
        key[:, :, : piece.num_keys],
        value[:, :, : piece.num_keys],
        attn_mask=piece.mask,
        is_causal=piece.mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result[0, :, :num].transpose(0, 1)


def _join(decodes: _Decodes, end: int, keys: Keys) -> bool:
    """Add a sequence to the last group if one strided view can hold both."""
    group = decodes.keys
    apart = keys.first - group.first - (group.count - 1) * group.apart
    if (
        keys.blocks is not None
        or group.blocks is not None
        or (group.count > 1 and apart != group.apart)
        or abs(keys.num_keys - group.num_keys) > TILE
    ):
        return False
    num_keys = max(keys.num_keys, group.num_keys)
    decodes.keys = Keys(num_keys, group.first, apart, group.count + 1)
    decodes.ends.append(end)
    return True


def _first_of_run(table: np.ndarray) -> int:
    """The first block of a table whose blocks are consecutive, else -1."""
    consecutive = table[-1] - table[0] == len(table) - 1 and bool((np.diff(table) == 1).all())
    return int(table[0]) if consecutive else -1


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls. `paged_step` is the Step, handed through the model's forward; the
    new keys and values are in the pool already."""
    step: Step = kwargs["paged_step"]
    return step.attend(module.layer_idx, query, kwargs.get("scaling"))[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention)
