"""The decoder layer that Llama, Mistral, Qwen2 and Qwen3 share, in few operations.

A step over a few rows is mostly the start of many small operations. transformers' own layer has 70
of them and 20 calls of modules; this one has 25 and computes the same. Other models run as
transformers defines them.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from foreword.engine.attention import Packed
from foreword.engine.linear import Gated

_FUSED = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


class FusedLayer(nn.Module):
    """Computes what `layer` does for one packed step; its linear layers are `layer`'s, joined where
    they read the same rows."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.head_size: int = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_size
        self.num_kv_heads = attention.k_proj.out_features // self.head_size
        self.query_key_value = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = attention.o_proj
        self.gated = Gated(mlp.gate_proj, mlp.up_proj, mlp.act_fn)
        self.down = mlp.down_proj
        self.attention_norm = Norm(layer.input_layernorm)
        self.mlp_norm = Norm(layer.post_attention_layernorm)
        self.head_norms = (
            (Norm(attention.q_norm), Norm(attention.k_norm))
            if hasattr(attention, "q_norm")
            else None
        )

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        paged_step: Packed,
        **kwargs: Any,
    ) -> Tensor:
        """Hidden states [1, rows, hidden size]; embeddings as FusedRotary gives them."""
        rows = hidden[0]
        attended = self._attention(self.attention_norm(rows), *position_embeddings, paged_step)
        rows = self.output.forward(attended).add_(rows)
        gated = self.gated.forward(self.mlp_norm(rows))
        result: Tensor = self.down.forward(gated).add_(rows)
        return result[None]

    def _attention(self, rows: Tensor, cos: Tensor, sin: Tensor, step: Packed) -> Tensor:
        num_rotated = self.num_heads + self.num_kv_heads
        heads = self.query_key_value.forward(rows).view(len(rows), -1, self.head_size)
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.head_norms is not None:
            norm_query, norm_key = self.head_norms
            query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
            rotated = torch.cat((norm_query(query), norm_key(key)), 1)
        swapped = rotated.roll(self.head_size // 2, -1)
        rotated = torch.addcmul(rotated * cos, swapped, sin)
        query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        step.write(self.index, key, value)
        return step.attend(self.index, query.transpose(0, 1)[None], self.scaling).flatten(1)


class Norm:
    """Root mean square norm: x / sqrt(mean(x ** 2) + eps) * weight, in float32.

    Of n values that is x / hypot(norm(x), sqrt(n * eps)) * sqrt(n) * weight: half the operations.
    """

    def __init__(self, norm: Any) -> None:
        size = len(norm.weight)
        self._weight = norm.weight.float() * math.sqrt(size)
        floor = math.sqrt(size * norm.variance_epsilon)
        self._floor = torch.tensor(floor, dtype=torch.float32, device=norm.weight.device)

    def __call__(self, rows: Tensor) -> Tensor:
        values = rows.to(torch.float32, copy=True)
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        return values.div_(length.hypot_(self._floor)).mul_(self._weight).to(rows.dtype)


class FusedRotary(nn.Module):
    """The model's rotary embeddings, once per step as FusedLayer wants them: [rows, 1, head size],
    the first half of the sines negated, so that rotating is x * cos + swapped halves of x * sin."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(hidden, position_ids)
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos[0, :, None], sin[0, :, None]


def fuse(module: Any) -> None:
    """Replace the decoder layers of a model that has only such ones."""
    decoder = module.base_model
    if all(type(layer).__name__ in _FUSED for layer in getattr(decoder, "layers", [None])):
        for index, layer in enumerate(decoder.layers):
            decoder.layers[index] = FusedLayer(layer)
        decoder.rotary_emb = FusedRotary(decoder.rotary_emb)


def _joined(*layers: nn.Linear) -> nn.Linear:
    """One layer for several that read the same rows, their outputs side by side."""
    weight = torch.cat([layer.weight.data for layer in layers])
    biases = [layer.bias.data for layer in layers if layer.bias is not None]
    joined = nn.Linear(layers[0].in_features, len(weight), bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined
