"""Linear layers on the CPU with their weights laid out once as oneDNN's kernels read them.

PyTorch keeps a weight as rows and columns, and oneDNN lays it out again, or takes a kernel that can
read it so, in every call. Laid out beforehand, a few rows take a quarter less time.

oneDNN also makes code for each number of rows that it meets and keeps it, up to some MB for each
weight's shape. So only few numbers of rows reach it: others are padded with zero rows.
"""

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2CLS

_SILU: Any = ACT2CLS["silu"]
_ROWS = 32  # that the layout is made for; for one row oneDNN takes another layout, slower for few
# Up to 8 rows it makes next to no code. AMX computes 16 at a time, so that many cost as 9 do.
_COUNTS: tuple[int, ...] = (
    *(*range(9), 12, 16, 24),
    *(*range(32, 256, 16), *range(256, 512, 32), *range(512, 1024, 64)),
)
_MANY = 128  # what larger numbers are multiples of


class Gated(nn.Module):
    """activation(gate(rows)) * up(rows)."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, activation: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.activation = gate, up, activation

    @property
    def is_plain(self) -> bool:
        """Whether both weights are as PyTorch keeps them."""
        return type(self.gate) is nn.Linear and type(self.up) is nn.Linear

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.activation(self.gate(rows)) * self.up(rows)
        return result


class PackedLinear(nn.Linear):
    """A linear layer whose `weight` is in oneDNN's layout: no element of it can be read."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        # No parameter, since modules copy and compare those.
        self.__dict__["weight"] = torch.ops.mkldnn._reorder_linear_weight(layer.weight, _ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        """Of rows [..., in] and as many zero rows as make one of few numbers."""
        flat = rows.reshape(-1, self.in_features)
        num_zero = padded_count(len(flat)) - len(flat)
        if not num_zero:
            return self._product(rows)
        result = self._product(functional.pad(flat, (0, 0, 0, num_zero)))[: len(flat)]
        return result.view(*rows.shape[:-1], self.out_features)

    def _product(self, rows: Tensor) -> Tensor:
        return self._pointwise(rows, "none")

    def _pointwise(self, rows: Tensor, function: str) -> Tensor:
        """The function, by oneDNN's name, of the result before it is rounded."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self.bias, function, [], ""
        )
        return result


class PackedGated(PackedLinear):
    """Gated by SiLU, in two products: oneDNN applies SiLU and the multiplication to their results
    before they are rounded."""

    def __init__(self, layer: Gated) -> None:
        super().__init__(layer.up)
        self._gate = (PackedLinear(layer.gate),)  # no module of the model: nobody else calls it

    def _product(self, rows: Tensor) -> Tensor:
        gate = self._gate[0]._pointwise(rows, "swish")
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows, gate, self.weight, self.bias, "mul"
        )
        return result


def padded_count(num_rows: int) -> int:
    """The least number that oneDNN may meet and is no smaller: from 32 rows on at most an eighth
    or 15 more."""
    if num_rows > _COUNTS[-1]:
        return -(-num_rows // _MANY) * _MANY
    return _COUNTS[bisect_left(_COUNTS, num_rows)]


def pack(module: nn.Module) -> None:
    """Replace the model's linear layers where oneDNN serves its device and dtype. Each weight is
    freed when its packed copy is made, except one that the embedding shares."""
    weight = next(module.parameters())
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for parent in module.modules():  # which goes down into what has been put in place
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear:
                setattr(parent, name, PackedLinear(layer))
            elif type(layer) is Gated and layer.is_plain and isinstance(layer.activation, _SILU):
                setattr(parent, name, PackedGated(layer))
