"""Linear layers on the CPU whose weights are kept in 4 or 8 bits: bfloat16 rows in and out.

A decode step mostly reads weights, so it gets quicker as they get smaller. PyTorch's kernels for
this sum every row by itself, whatever is computed beside it, which exact mode asks for; with many
rows they are slower than those for bfloat16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

GROUP = 32  # inputs of one output that share a scale and a middle in int4
WEIGHTS_IN_ROWS = 2  # reading a layer's weights costs about as much as computing so many rows
_FORMAT = 1  # another number when the same weights become other bits: it is part of the Identity
_OUTPUTS_INT4 = 16  # the kernel's layout takes outputs by so many
_ROWS = 1024  # of a weight that are rounded at a time: float32 copies stay small


class QuantisedLinear(nn.Linear):
    """A linear layer without `weight`: `packed` codes and bfloat16 `scales`."""

    packed: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear, packed: Tensor, scales: Tensor) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)

    @property
    def num_bytes(self) -> int:
        """Of the weight."""
        return self.packed.nbytes + self.scales.nbytes

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., in] give [..., out]."""
        result = self._product(rows.reshape(-1, self.in_features))
        if self.bias is not None:
            result += self.bias
        return result.view(*rows.shape[:-1], self.out_features)

    def _product(self, rows: Tensor) -> Tensor:
        raise NotImplementedError


class Int8Linear(QuantisedLinear):
    """A scale per output."""

    def __init__(self, layer: nn.Linear) -> None:
        pieces = [_int8(rows) for rows in torch.split(layer.weight, _ROWS)]
        codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        super().__init__(layer, codes, scales)

    def _product(self, rows: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(rows, self.packed, self.scales)


class Int4Linear(QuantisedLinear):
    """A scale and a middle per output and group of inputs."""

    def __init__(self, layer: nn.Linear) -> None:
        pieces = [_int4(rows) for rows in torch.split(layer.weight, _ROWS)]
        codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        super().__init__(layer, packed, scales.transpose(0, 1).contiguous())

    def _product(self, rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self.packed, GROUP, self.scales
        )
        return result


@dataclass(frozen=True, slots=True)
class Quantised:
    """What became of a model's linear layers."""

    kind: str
    num_layers: int  # quantised
    num_left: int  # that do not fit the format
    num_bytes: int  # of the quantised weights
    bfloat16_bytes: int  # of the same ones before

    @property
    def scheme(self) -> str:
        """Two models with equal weights and scheme compute the same."""
        return f"{self.kind};groups of {GROUP};format {_FORMAT}"

    @property
    def description(self) -> str:
        kind = f"int4 in groups of {GROUP}, output layer int8" if self.kind == "int4" else "int8"
        sizes = f"{self.num_bytes / (1 << 20):,.0f} MiB for {self.bfloat16_bytes / (1 << 20):,.0f}"
        left = f"; {self.num_left} linear layers stay bfloat16" if self.num_left else ""
        return f"{kind}, {sizes} of bfloat16{left}"


def quantise_layers(module: nn.Module, kind: str) -> Quantised:
    """Replace a bfloat16 model's linear layers, the output layer by an int8 one in any case. Each
    weight is freed when it is rounded, except one that the embedding shares."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    made: list[QuantisedLinear] = []
    num_left = 0
    for parent in module.modules():  # which goes down into what has been put in place
        for name, layer in parent.named_children():
            if type(layer) is not nn.Linear:
                continue
            form = Int8Linear if kind == "int8" or layer is head else Int4Linear
            if _fits(layer, form):
                made.append(form(layer))
                setattr(parent, name, made[-1])
            else:
                num_left += 1
    return Quantised(
        kind,
        len(made),
        num_left,
        sum(layer.num_bytes for layer in made),
        sum(2 * layer.in_features * layer.out_features for layer in made),
    )


def _fits(layer: nn.Linear, form: type[QuantisedLinear]) -> bool:
    """The int8 kernel takes inputs by 16 and reads past the end of others; by GROUP is one rule for
    both."""
    by = _OUTPUTS_INT4 if form is Int4Linear else 1
    return layer.in_features % GROUP == 0 and layer.out_features % by == 0


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [out, in], int8, and scales [out]: weight = code * scale."""
    values = weight.float()
    scales = (values.abs().amax(1) / 127).to(weight.dtype)
    steps = scales.float().clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return (values / steps).round_().clamp_(-128, 127).to(torch.int8), scales


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [out, in], 0 to 15 as int32, and pairs of scale and middle [out, groups, 2]:
    weight = (code - 8) * scale + middle."""
    values = weight.float().view(len(weight), -1, GROUP)
    low, high = values.aminmax(dim=2)
    scale = ((high - low) / 15).to(weight.dtype)
    # From the middle of the range, so that a scale rounded off misses both ends by half of it.
    middle = ((low + high + scale.float()) / 2).to(weight.dtype)
    steps = scale.float().clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]
    codes = ((values - middle.float()[:, :, None]) / steps).round_().add_(8).clamp_(0, 15)
    return codes.flatten(1).to(torch.int32), torch.stack((scale, middle), 2)
