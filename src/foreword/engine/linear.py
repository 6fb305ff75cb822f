"""Linear layers on the CPU with their weights laid out once as oneDNN's kernels read them.

PyTorch keeps a weight as rows and columns, and oneDNN lays it out again, or takes a kernel that can
read it so, in every call. Laid out beforehand, a few rows take a quarter less time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

_SILU: Any = ACT2CLS["silu"]
_ROWS = 32  # that the layout is made for; for one row oneDNN takes another layout, slower for few


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

    def forward(self, rows: Tensor) -> Tensor:
        gate = self._gate[0]._pointwise(rows, "swish")
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows, gate, self.weight, self.bias, "mul"
        )
        return result


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
