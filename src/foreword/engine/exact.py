"""Exact mode: a token's KV and logits have the same bits whatever is computed beside it.

Matrix kernels choose how to sum by the number of rows, so a token prefilled alone, in a chunk or in
a batch can come out with other bits. Which row counts agree depends on the machine, so it is
measured at start: for each shape of linear layer the row counts whose rows agree bit for bit, and
for attention the widths of the last key tile that do. Linear layers then compute in tiles of such
row counts, padded with zero rows. A self-test on the loaded model decides whether that is enough;
where it is not, exact mode is off and says why.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from hashlib import sha256
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2CLS

from foreword.engine.attention import ANY_WIDTH, AttentionRules, Part
from foreword.engine.kv import TILE, LayerShape, PagedKV
from foreword.engine.linear import PackedGated, PackedLinear
from foreword.engine.model import LoadedModel
from foreword.engine.quantised import WEIGHTS_IN_ROWS, Int4Linear, Int8Linear, QuantisedLinear

COUNTS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048)
_HEAD_COUNTS = COUNTS[:8]  # the output layer sees one row per sequence, and is large
_TYPICAL = (1, 1, 8, 8, 64, 2048)  # rows of steps: most of them decode a stream or a small batch
_WEIGHTS_IN_ROWS = 128  # reading a layer's weights costs about as much as computing so many rows
_MANY_COLUMNS = 8192  # of a layer, which show a difference in one draw of rows
_SHARE = 32768  # elements: PyTorch starts no thread for fewer
_VECTORS = 64  # elements: no vector loop handles more at a time
_LINEAR: dict[type[nn.Module], str] = {  # kinds of layer, and what tells their kernels apart
    nn.Linear: "",
    PackedLinear: "",
    PackedGated: " gated",
    Int4Linear: " int4",
    Int8Linear: " int8",
}
_ACTIVATIONS = {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()}
_TEST_BLOCK = 16  # tokens
_TEST_CHUNKS = (33, 65, 193, 478, 1, 14)  # cuts at 33, 98, 291, 769 and 770
_TEST_TOKENS = sum(_TEST_CHUNKS)
_TEST_AGAIN = (_TEST_TOKENS - 1, 512, 511, 150)  # positions of tokens computed again alone

Forward = Callable[[PagedKV, Sequence[Part]], Tensor]


class Tiling:
    """How one shape of linear layer is cut into calls of row counts that give the same bits, so
    that which of them are used is a question of time alone."""

    def __init__(self, counts: Sequence[int], weights_in_rows: int = _WEIGHTS_IN_ROWS) -> None:
        self.counts = tuple(counts)
        self.weights_in_rows = weights_in_rows
        self._plans: dict[int, tuple[int, ...]] = {}

    def plan(self, num_rows: int) -> tuple[int, ...]:
        """Row counts of the calls, together at least `num_rows`: tiles of one size, then of a
        second one for the rest."""
        plan = self._plans.get(num_rows)
        if plan is None:
            plan = self._plans[num_rows] = min(_plans(num_rows, self.counts), key=self._cost)
        return plan

    def effort(self, steps: Sequence[int]) -> float:
        """How much work steps of so many rows become, relative to calls of any row count."""
        return sum(self._cost(self.plan(rows)) / self._cost((rows,)) for rows in steps)

    def _cost(self, plan: Sequence[int]) -> int:
        """In rows. A model and not a clock: a busy machine would teach a clock nonsense, and two
        starts must choose alike, or blocks of the earlier one would not fit."""
        return sum(self.weights_in_rows + count for count in plan)


def _plans(num_rows: int, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for first in counts:
        whole, rest = divmod(num_rows, first)
        for second in counts if rest else (1,):
            yield (first,) * whole + (second,) * -(-rest // second)


@dataclass(frozen=True, eq=False)
class ExactRules:
    """What keeps bits equal here. `tilings` by rows x columns of the weight, head apart."""

    tilings: dict[str, Tiling]
    attention: AttentionRules

    @property
    def fingerprint(self) -> str:
        """Differs where the bits may: in the row counts and widths that belong together."""
        counts = {shape: tiling.counts for shape, tiling in self.tilings.items()}
        return sha256(json.dumps([counts, astuple(self.attention)]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether exact mode is on, and why or why not. `rules` where it is on."""

    exact: bool
    reason: str
    rules: ExactRules | None = None


class RowExactLayers:
    """Replaces the forward of a model's linear layers and activations by one that obeys the rules
    while they are set. A model may serve exact and ordinary runners in turn."""

    def __init__(self, module: nn.Module) -> None:
        self.rules: ExactRules | None = None
        replaced: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = [
            (layer, partial(self._linear, layer, shape))
            for shape, layers in linear_shapes(module).items()
            for layer in layers
        ]
        replaced += [
            (layer, partial(self._activation, layer.forward))
            for layer in module.modules()
            if type(layer) in _ACTIVATIONS
        ]
        for layer, forward in replaced:
            layer.forward = forward

    def _activation(self, forward: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        if self.rules is None or rows.device.type != "cpu":
            return forward(rows)
        return in_whole_vectors(forward, rows)

    def _linear(self, layer: nn.Linear, shape: str, rows: Tensor) -> Tensor:
        if self.rules is None:
            return type(layer).forward(layer, rows)
        flat = rows.reshape(-1, layer.in_features)
        flat = in_tiles(flat, layer, self.rules.tilings[shape].plan(len(flat)))
        return flat.view(*rows.shape[:-1], layer.out_features)


def in_tiles(rows: Tensor, layer: nn.Linear, plan: tuple[int, ...]) -> Tensor:
    """The linear layer over rows [rows, in], computed in calls of `plan` rows each."""
    forward = partial(type(layer).forward, layer)  # not the instance's, which RowExactLayers set
    num = len(rows)
    if sum(plan) == num and len(plan) < 2:  # the whole, or no rows at all
        return forward(rows)
    padded = functional.pad(rows, (0, 0, 0, sum(plan) - num))
    return torch.cat([forward(piece) for piece in torch.split(padded, list(plan))])[:num]


def in_whole_vectors(activation: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """An elementwise function, padded so that no element is computed by scalar code.

    PyTorch shares elements out among threads and computes what is left of each share after whole
    vectors by other code, whose exp() differs in the last bit: which elements that hits depends on
    the number of rows.
    """
    num = padded = rows.numel()
    while True:
        shares = max(1, min(torch.get_num_threads(), -(-padded // _SHARE)))
        whole = -(-padded // (shares * _VECTORS)) * shares * _VECTORS
        if whole == padded:
            break
        padded = whole
    if padded == num:
        return activation(rows)
    flat = functional.pad(rows.reshape(-1), (0, padded - num))
    return activation(flat)[:num].view(rows.shape)


def linear_shapes(module: nn.Module) -> dict[str, list[nn.Linear]]:
    """A model's linear layers by what their kernels depend on."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    shapes: dict[str, list[nn.Linear]] = {}
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and type(layer) in _LINEAR:
            name = f"{layer.out_features}x{layer.in_features}{_LINEAR[type(layer)]}"
            name += "+bias" * (layer.bias is not None) + " head" * (layer is head)
            shapes.setdefault(name, []).append(layer)
    return shapes


_layers: "WeakKeyDictionary[nn.Module, RowExactLayers]" = WeakKeyDictionary()


def row_exact_layers(module: nn.Module) -> RowExactLayers:
    """The model's replaced layers; replaced when first asked for."""
    if module not in _layers:
        _layers[module] = RowExactLayers(module)
    return _layers[module]


@torch.inference_mode()
def measure(model: LoadedModel, step: Callable[[ExactRules], Forward]) -> Exactness:
    """Measure this machine and test the loaded model, which takes seconds. `step` gives the forward
    under rules."""
    shapes = linear_shapes(model.module)
    tilings = {
        shape: agreeing_counts(layers[0], _HEAD_COUNTS if "head" in shape else COUNTS)
        for shape, layers in shapes.items()
    }
    heads = model.module.config.get_text_config().num_attention_heads
    dtype, device = model.module.dtype, model.module.device
    widths = set(ANY_WIDTH)
    for layer in set(model.layers):
        widths &= agreeing_widths(layer, heads, dtype, device)
    last_widths, failure = tuple(sorted(widths)), ""
    for attention in (
        AttentionRules(last_widths, True),
        AttentionRules(last_widths, False),
        AttentionRules((TILE,), False),
    ):
        rules = ExactRules(tilings, attention)
        failure = self_test(model, step(rules))
        if not failure:
            return Exactness(True, "the self-test found every bit equal", rules)
    return Exactness(False, f"the self-test found other bits {failure}")


def agreeing_counts(layer: nn.Linear, counts: Sequence[int]) -> Tiling:
    """Row counts whose results agree bit for bit in every row; of several such sets, the one that
    costs typical steps least."""
    if isinstance(layer, QuantisedLinear):
        like, in_rows = layer.scales, WEIGHTS_IN_ROWS
    else:
        like, in_rows = layer.weight, _WEIGHTS_IN_ROWS
    generator = torch.Generator().manual_seed(0)
    results: dict[int, list[Tensor]] = {count: [] for count in counts}
    for _ in range(1 if layer.out_features > _MANY_COLUMNS else 2):
        drawn = torch.randn(counts[-1], layer.in_features, generator=generator)
        rows = drawn.to(like.device, like.dtype)
        for count in counts:
            num_calls = min(counts[-1], max(64 if count <= 32 else 512, count)) // count
            results[count].append(in_tiles(rows[: num_calls * count], layer, (count,) * num_calls))
    agreeing: list[list[int]] = []
    for count in counts:
        for members in agreeing:
            if all(map(_equal_rows, results[members[-1]], results[count])):
                members.append(count)
                break
        else:
            agreeing.append([count])
    steps = [num_rows for num_rows in _TYPICAL if num_rows <= counts[-1]]
    tilings = [Tiling(members, in_rows) for members in agreeing]
    return min(tilings, key=lambda tiling: tiling.effort(steps))


def _equal_rows(left: Tensor, right: Tensor) -> bool:
    num = min(len(left), len(right))
    return torch.equal(left[:num], right[:num])


def agreeing_widths(
    layer: LayerShape, num_heads: int, dtype: torch.dtype, device: torch.device
) -> set[int]:
    """Widths of the last key tile that give a decoding row the bits that a whole tile gives."""
    generator = torch.Generator().manual_seed(0)
    group = -(-num_heads // layer.num_kv_heads // 4) * 4

    def draw(num: int, size: int) -> Tensor:
        shape = (4, layer.num_kv_heads, num, size)
        return torch.randn(shape, generator=generator).to(device, dtype)

    query = draw(group, layer.key_size)
    keys, values = draw(2 * TILE, layer.key_size), draw(2 * TILE, layer.value_size)

    def attend(width: int, lasts: Sequence[int]) -> Tensor:
        num = TILE + width
        mask = torch.zeros(len(lasts), 1, 1, num, dtype=dtype, device=device)
        for row, last in zip(mask, lasts, strict=True):
            row[..., TILE + last :] = float("-inf")
        return functional.scaled_dot_product_attention(
            query, keys[:, :, :num], values[:, :, :num], attn_mask=mask
        )

    def agrees(width: int) -> bool:
        lasts = (width - 15, width - 6, width - 1, width)
        return torch.equal(attend(width, lasts), attend(TILE, lasts))

    return {width for width in ANY_WIDTH if agrees(width)}


def self_test(model: LoadedModel, step: Forward) -> str:
    """Compute one random prompt in many ways on a pool of its own and compare all KV and logits.

    Returns where bits differ, or an empty string.
    """
    num = -(-_TEST_TOKENS // _TEST_BLOCK)
    kv = PagedKV(model.layers, 2 * num + 22, _TEST_BLOCK, model.module.dtype, model.module.device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (_TEST_TOKENS,), generator=generator).tolist()
    viewed, gathered = list(range(num)), list(range(2 * num - 1, num - 1, -1))
    expected = step(kv, [Part(viewed, 0, ids, True)])
    start, logits = 0, expected
    for size in _TEST_CHUNKS:
        logits = step(kv, [Part(gathered, start, ids[start : start + size], True)])
        start += size
    if not (torch.equal(logits, expected) and _same_kv(kv, viewed, gathered)):
        return "in a prompt computed in chunks"

    # Computing known tokens again must write the same keys and values over themselves.
    decodes = [
        Part(table, at, ids[at : at + 1], True)
        for table in (viewed, gathered)
        for at in _TEST_AGAIN
    ]
    other = list(range(2 * num, 2 * num + 22))
    prefill = [Part(other, 0, ids[:97], False), Part(other, 97, ids[97:352], False)]
    alone = {i: step(kv, [decodes[i]]) for i in (0, 1, 4, 5)}
    if not torch.equal(alone[0], expected):
        return "in one token computed alone"
    for chosen, beside in (
        ((0, 1), []),
        ((0, 1, 4, 5, 6), []),
        (range(8), []),
        ((0,), prefill[:1]),
        (range(8), prefill[1:]),
    ):
        together = step(kv, [*(decodes[i] for i in chosen), *beside])
        for row, i in zip(together, chosen, strict=True):
            if not torch.equal(row, alone.setdefault(i, row[None])[0]):
                return f"in a batch of {len(chosen)}" + ", mixed with prefill" * bool(beside)
    if not (_same_kv(kv, viewed, gathered) and _same_kv(kv, viewed[:22], other)):
        return "in the keys and values of a batch"
    return ""


def _same_kv(kv: PagedKV, left: list[int], right: list[int]) -> bool:
    def blocks(pool: Tensor, table: list[int]) -> Tensor:
        by_block = pool.view(-1, kv.block_size, *pool.shape[1:])
        return by_block[torch.tensor(table, device=pool.device)]

    return all(torch.equal(blocks(p, left), blocks(p, right)) for p in (*kv.keys, *kv.values))
