"""Attention of one packed step over the paged pool: many sequences, prefill and decode mixed.

transformers calls `paged_attention` once per layer; what it must know of the step, where keys lie
and what each row may see, is built once per step in a `Packed`.

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
ANY_WIDTH = tuple(range(16, TILE + 1, 16))
_ROWS = 4  # with fewer query rows in a block the kernels take another path
_FEW_ROWS = 48  # of a prefill; more fill the kernels by themselves
_MAX_FOLDED = 512  # elements; larger heads fill the kernels by themselves
_MAX_GATHERED = 16384  # tokens that are gathered for one call
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """What decode may do. Exact mode allows what gives equal bits on this machine."""

    last_widths: tuple[int, ...]  # of the last key tile, ascending; the last one is TILE
    fold: bool  # KV heads into one


ANY_RULES = AttentionRules(ANY_WIDTH, True)


@dataclass(frozen=True, slots=True)
class Part:
    """What one sequence computes in a step."""

    block_ids: Sequence[int]  # its block table in prefix order, to the last new token or further
    start: int  # tokens whose KV is in the pool already
    token_ids: Sequence[int]  # the new ones, at least one
    num_logits: int  # how many of the last tokens' are wanted

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the keys of `count` sequences lie: a view of the pool if each has consecutive blocks
    and they start equally far apart, else a gather of `blocks`."""

    count: int
    num_keys: int
    first: int = 0  # slot
    apart: int = 0  # slots
    blocks: Tensor | None = None  # block ids, as many for each sequence

    def read(self, pool: Tensor, block_size: int, fold: bool = False) -> Tensor:
        """[count, kv heads, num_keys, head size] out of [slots, kv heads, head size].

        With `fold`, the KV heads side by side as one: [count, 1, num_keys, kv heads * head size].
        """
        slots, heads, size = pool.shape
        if fold:
            heads, size = 1, heads * size
        row = heads * size
        if self.blocks is not None:
            pool = pool.view(slots // block_size, -1).index_select(0, self.blocks)
            first, apart = 0, len(self.blocks) // self.count * block_size
        else:
            first, apart = self.first, self.apart
        shape = (self.count, heads, self.num_keys, size)
        return pool.as_strided(shape, (apart * row, size, row, 1), first * row)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows start to stop of one prefill, which see `num_keys` keys; no mask means plain causal.

    With `heads_as_rows` the heads that share a KV head are computed side by side as rows of one,
    and the mask is repeated for each: for few rows that makes fewer, larger products.
    """

    start: int
    stop: int
    num_keys: int
    mask: Tensor | None = None
    heads_as_rows: bool = False


# By group of decodes its mask, and by prefill its pieces.
_Plan = tuple[list[Tensor | None], list[list[Piece]]]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part with its block table and, where that is consecutive, its first slot, else -1."""

    part: Part
    table: np.ndarray
    first: int

    @property
    def end(self) -> int:
        return self.part.end


class Packed:
    """One packed forward. `order` says which part each run of rows belongs to: parts that decode
    come first, neighbours in the pool next to each other, so that one call can serve several."""

    def __init__(
        self, kv: PagedKV, parts: Sequence[Part], rules: AttentionRules = ANY_RULES
    ) -> None:
        self.kv = kv
        self._dtype, self._device = kv.keys[0].dtype, kv.keys[0].device
        self._rules = rules
        sequences = [self._sequence(part) for part in parts]
        self.order = sorted(range(len(parts)), key=lambda i: _place(sequences[i]))
        ordered = [sequences[i] for i in self.order]
        self.slots = torch.from_numpy(np.concatenate([self._slots(s) for s in ordered])).to(
            self._device
        )
        self._num_decodes = sum(len(s.part.token_ids) == 1 for s in ordered)
        self._groups: list[list[_Placed]] = []
        for sequence in ordered[: self._num_decodes]:
            if self._groups and _fits(self._groups[-1], sequence):
                self._groups[-1].append(sequence)
            else:
                self._groups.append([sequence])
        self._prefills = ordered[self._num_decodes :]
        self._decode_keys = [
            self._keys(group, self._width(max(s.end for s in group))) for group in self._groups
        ]
        self._prefill_keys = [self._keys([s], _up(s.end, TILE)) for s in self._prefills]
        self._built: dict[tuple[int | None, int], _Plan] = {}

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put the new keys and values, [rows, kv heads, size], into the pool."""
        self.kv.keys[layer].index_copy_(0, self.slots, key)
        self.kv.values[layer].index_copy_(0, self.slots, value)

    def attend(self, layer: int, query: Tensor, scaling: float | None) -> Tensor:
        """Attention of query [1, heads, rows, size]: [rows, heads, value size]."""
        keys, values, block_size = self.kv.keys[layer], self.kv.values[layer], self.kv.block_size
        _masks, pieces = self._plan(self.kv.layers[layer].window, query.shape[1] // keys.shape[1])
        out = query.new_empty(query.shape[2], query.shape[1], values.shape[2])
        start = self._num_decodes
        if start:
            self._decode(layer, query, scaling, out[:start])
        for sequence, where, cut in zip(self._prefills, self._prefill_keys, pieces, strict=True):
            key, value = where.read(keys, block_size), where.read(values, block_size)
            for piece in cut:
                rows = slice(start + piece.start, start + piece.stop)
                out[rows] = _prefill(query[:, :, rows], key, value, piece, scaling)
            start += len(sequence.part.token_ids)
        return out

    def _decode(self, layer: int, query: Tensor, scaling: float | None, out: Tensor) -> None:
        """Rows of sequences with one new token, into out [sequences, heads, value size].

        The heads that share a KV head become query rows, padded with zero rows: one row alone
        costs several times as much. Where the KV heads fold, they become one head of their sizes
        together, and a query row is zero outside of its own: fewer, larger products.
        """
        keys, values, block_size = self.kv.keys[layer], self.kv.values[layer], self.kv.block_size
        (num, heads, size), num_kv = out.shape, keys.shape[1]
        group = heads // num_kv
        masks, _pieces = self._plan(self.kv.layers[layer].window, group)
        rows = query[0, :, :num].transpose(0, 1).reshape(num, num_kv, group, query.shape[3])
        rows = functional.pad(rows, (0, 0, 0, -group % _ROWS))
        start = 0
        for where, mask in zip(self._decode_keys, masks, strict=True):
            stop = start + where.count
            fold = self._folds(keys, where.count)
            result = functional.scaled_dot_product_attention(
                _spread(rows[start:stop]) if fold else rows[start:stop],
                where.read(keys, block_size, fold),
                where.read(values, block_size, fold),
                attn_mask=mask,
                scale=scaling,
            )
            if fold:
                result = result.view(where.count, num_kv, -1, num_kv, size)
                result = result.diagonal(0, 1, 3).permute(0, 3, 1, 2)
            out[start:stop].view(where.count, num_kv, group, size)[:] = result[:, :, :group]
            start = stop

    def _folds(self, keys: Tensor, count: int) -> bool:
        """Worth it while the folded head is small, and one head per sequence keeps all threads
        busy. float32 has no matrix unit to fill."""
        return (
            self._rules.fold
            and self._dtype is torch.bfloat16
            and self._device.type == "cpu"
            and count >= torch.get_num_threads()
            and keys.shape[1] * keys.shape[2] <= _MAX_FOLDED
        )

    def _sequence(self, part: Part) -> _Placed:
        num_blocks = -(-part.end // self.kv.block_size)
        table = np.asarray(part.block_ids[:num_blocks], dtype=np.int64)
        assert len(table) == num_blocks > 0, "the block table is too short"
        run = table[-1] - table[0] == num_blocks - 1 and bool((np.diff(table) == 1).all())
        return _Placed(part, table, int(table[0]) * self.kv.block_size if run else -1)

    def _slots(self, sequence: _Placed) -> np.ndarray:
        positions = np.arange(sequence.part.start, sequence.end)
        blocks = sequence.table[positions // self.kv.block_size]
        slots: np.ndarray = blocks * self.kv.block_size + positions % self.kv.block_size
        return slots

    def _width(self, num_tokens: int) -> int:
        whole, rest = num_tokens // TILE * TILE, num_tokens % TILE
        return whole + (next(w for w in self._rules.last_widths if w >= rest) if rest else 0)

    def _keys(self, group: list[_Placed], num_keys: int) -> Keys:
        count, first = len(group), group[0].first
        if first >= 0:
            return Keys(
                count, num_keys, first, group[-1].first - group[-2].first if count > 1 else 0
            )
        num_blocks = -(-num_keys // self.kv.block_size)
        blocks = np.full((count, num_blocks), self.kv.spare_block)
        for row, sequence in zip(blocks, group, strict=True):
            row[: len(sequence.table)] = sequence.table
        return Keys(count, num_keys, blocks=torch.from_numpy(blocks.ravel()).to(self._device))

    def _plan(self, window: int | None, group: int) -> _Plan:
        plan = self._built.get((window, group))
        if plan is None:
            masks = [
                self._decode_mask([s.end for s in group], keys.num_keys, window)
                for group, keys in zip(self._groups, self._decode_keys, strict=True)
            ]
            pieces = [self._pieces(s.part, window, group) for s in self._prefills]
            plan = self._built[window, group] = masks, pieces
        return plan

    def _decode_mask(self, ends: list[int], num_keys: int, window: int | None) -> Tensor | None:
        if window is None and all(end == num_keys for end in ends):
            return None
        mask = torch.zeros(len(ends), 1, 1, num_keys, dtype=self._dtype)
        for row, end in zip(mask, ends, strict=True):
            row[..., end:] = _NEVER
            if window is not None and end > window:
                row[..., : end - window] = _NEVER
        return mask.to(self._device)

    def _pieces(self, part: Part, window: int | None, group: int) -> list[Piece]:
        num = len(part.token_ids)
        if part.start == 0 and (window is None or num <= window):
            return [Piece(0, num, _up(num, TILE))]
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
            heads_as_rows = group > 1 and stop - start <= _FEW_ROWS
            if heads_as_rows:
                mask = mask.repeat(group, 1)
            pieces.append(Piece(start, stop, num_keys, mask, heads_as_rows))
            start = stop
        return pieces


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, piece: Piece, scaling: float | None
) -> Tensor:
    """Query [1, heads, rows, size] to [rows, heads, value size]."""
    (_, heads, num, size), num_kv = query.shape, key.shape[1]
    query = functional.pad(query, (0, 0, 0, -num % _ROWS))
    if piece.heads_as_rows:
        query = query.reshape(1, num_kv, -1, size)
    result = functional.scaled_dot_product_attention(
        query,
        key[:, :, : piece.num_keys],
        value[:, :, : piece.num_keys],
        attn_mask=piece.mask,
        is_causal=piece.mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != num_kv,
    )
    return result.view(heads, -1, value.shape[3])[:, :num].transpose(0, 1)


def _spread(rows: Tensor) -> Tensor:
    """Query rows [count, kv heads, rows, size] for folded keys: each row's values in its own KV
    head's columns, zeros elsewhere: [count, 1, kv heads * rows, kv heads * size]."""
    count, heads, num, size = rows.shape
    spread = rows.new_zeros(count, heads, num, heads, size)
    spread.diagonal(0, 1, 3).copy_(rows.permute(0, 2, 3, 1))
    return spread.view(count, 1, heads * num, heads * size)


def _place(sequence: _Placed) -> tuple[bool, bool, int]:
    """Sort key of the parts of a step: decodes before prefills, views by place, gathers by end."""
    gathered = sequence.first < 0
    prefill = len(sequence.part.token_ids) > 1
    return prefill, gathered, sequence.end if gathered else sequence.first


def _fits(group: list[_Placed], sequence: _Placed) -> bool:
    """Whether one call can serve this sequence too: about as long, and as far off as the others."""
    first, last = group[0], group[-1]
    if abs(sequence.end - first.end) > TILE:
        return False
    if first.first < 0 or sequence.first < 0:
        return first.first == sequence.first and (len(group) + 1) * sequence.end <= _MAX_GATHERED
    return len(group) == 1 or sequence.first - last.first == last.first - group[-2].first


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
    """What transformers calls. `paged_step` is the Packed, handed through the model's forward; the
    new keys and values are in the pool already."""
    step: Packed = kwargs["paged_step"]
    return step.attend(module.layer_idx, query, kwargs.get("scaling"))[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention)
