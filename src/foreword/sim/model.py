"""ModelShape: what of a model decides the size of its KV and the work of its prefill; from a
Hugging Face config.json.

Parameters are counted from the matrices of a decoder with gated MLPs, dense or of experts; norms
and biases, under 0.3 % of them, are left out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.core.cost import StepCost

# Bytes of one number. mxfp4 has a scale of 8 bits for each 32 numbers (OCP Microscaling 1.0).
DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "mxfp4": 4.25 / 8,
}
# Whose matrices are those that `_num_params` counts; held against transformers' own modules.
COUNTED = (
    *("deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "gpt_oss", "granite"),
    *("kimi_k2", "llama", "mistral", "mixtral", "olmo2", "phi3", "phimoe", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "smollm3"),
)
_TIED = ("gemma", "gemma2", "gemma3_text", "smollm3")  # where config.json does not say
# Where it does not say: how many layers up to the next that attends to everything.
_PERIODS = {"gemma2": 2, "gemma3_text": 6}


class ShapeError(Exception):
    """A config that no figure may come from. The message is for the user."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`latent_size`: of MLA, the numbers that a layer keeps of a token for all heads together.
    `num_window_layers` of the layers attend to the last `window` tokens only."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int  # of a query and a key
    num_params: int
    num_active_params: int  # that one token passes through
    context: int  # tokens
    latent_size: int = 0
    value_size: int = 0  # 0: as a key
    window: int = 0
    num_window_layers: int = 0
    weights_dtype: str = "bfloat16"  # as published, of DTYPE_BYTES or another
    source: str = ""

    @property
    def attention(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.latent_size:
            return "MLA"
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "GQA" if self.num_kv_heads > 1 else "MQA"

    @property
    def kv_numbers(self) -> int:
        """How many numbers the KV of a token has, of all layers, those of a window too: whoever
        resumes at that token needs them."""
        if self.latent_size:
            return self.num_layers * self.latent_size
        return self.num_layers * self.num_kv_heads * (self.head_size + self.values)

    @property
    def values(self) -> int:
        """The size of a value in one head."""
        return self.value_size or self.head_size

    @property
    def flops_per_pair(self) -> int:
        """Of one layer, for a token and one that it attends to: a multiplication and an addition
        for each number of a key and of a value, in each head. MLA's prefill expands the latents."""
        return 2 * self.num_heads * (self.head_size + self.values)

    def weights_bytes(self, dtype: str | None = None) -> float:
        """Of all parameters, in another type than the published one where `dtype` says so. Raises
        ShapeError for a type of unknown size."""
        chosen = dtype or self.weights_dtype
        if chosen not in DTYPE_BYTES:
            raise ShapeError(
                f"{self.name}: bytes of a weight in {chosen!r} are not known; say them with "
                f"--weights-dtype ({', '.join(DTYPE_BYTES)})"
            )
        return self.num_params * DTYPE_BYTES[chosen]

    def step_cost(self, flops_per_s: float) -> StepCost:
        """A prefill at this rate: two FLOPs per active parameter and token, and attention. In a
        layer with a window each token is taken to attend to a whole window, so the first tokens of
        a prompt are charged a little too much."""
        windows = self.num_window_layers * self.window * self.flops_per_pair
        full_layers = self.num_layers - self.num_window_layers
        return StepCost(
            per_token_s=(2 * self.num_active_params + windows) / flops_per_s,
            per_pair_s=full_layers * self.flops_per_pair / flops_per_s,
        )


def read_shape(path: Path) -> ModelShape:
    """From a config.json or the folder that holds it. Raises ShapeError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ShapeError(f"{file} cannot be read: {getattr(error, 'strerror', error)}") from error
    except json.JSONDecodeError as error:
        raise ShapeError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ShapeError(f"{file} holds no object")
    return shape_of(config, file.resolve().parent.name, str(file))


def shape_of(config: Mapping[str, Any], name: str, source: str = "config.json") -> ModelShape:
    """From the fields of a config.json; of one with several parts, its text model. Raises
    ShapeError that names the field that is missing or cannot be."""
    fields = _Fields(config.get("text_config") or config, source)
    kind = fields.text("model_type")
    if kind not in COUNTED:
        raise ShapeError(
            f"{source}: model_type {kind!r} is none whose parameters can be counted from its "
            f"config ({', '.join(COUNTED)})"
        )
    heads = fields.number("num_attention_heads")
    num_params, num_active = _num_params(fields)
    window_layers = _num_window_layers(fields)
    shape = ModelShape(
        name=name,
        num_layers=fields.number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.number("num_key_value_heads", heads),
        head_size=_head_size(fields),
        num_params=num_params,
        num_active_params=num_active,
        context=fields.number("max_position_embeddings"),
        window=fields.number("sliding_window") if window_layers else 0,
        num_window_layers=window_layers,
        weights_dtype=_weights_dtype(fields),
        source=source,
    )
    if "kv_lora_rank" not in fields.values:
        return shape
    rope = fields.number("qk_rope_head_dim")
    return ModelShape(
        **{field: getattr(shape, field) for field in ModelShape.__slots__}
        | {
            "num_kv_heads": 1,  # one latent for all heads
            "head_size": fields.number("qk_nope_head_dim") + rope,
            "value_size": fields.number("v_head_dim"),
            "latent_size": fields.number("kv_lora_rank") + rope,
        }
    )


class _Fields:
    """Of one config; says which is missing."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ShapeError(f"{self.source}: {name} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ShapeError(f"{self.source}: {name} is {value!r}, no whole number from {least}")
        return value

    def text(self, name: str) -> str:
        if not isinstance(self.values.get(name), str):
            raise ShapeError(f"{self.source}: {name} is missing")
        return str(self.values[name])

    def first(self, names: Sequence[str]) -> int:
        """The first of them that is there; 0 where none is."""
        return next((self.number(name) for name in names if self.values.get(name)), 0)


def _head_size(fields: _Fields) -> int:
    if fields.values.get("head_dim"):
        return fields.number("head_dim")
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    if hidden % heads:
        raise ShapeError(
            f"{fields.source}: head_dim is missing, and hidden_size {hidden} is no multiple of "
            f"num_attention_heads {heads}"
        )
    return hidden // heads


def _weights_dtype(fields: _Fields) -> str:
    quantised = fields.values.get("quantization_config")
    if quantised:  # one that DTYPE_BYTES does not have is for the user to say
        return str(quantised.get("quant_method", "quantised"))
    said = fields.values.get("dtype") or fields.values.get("torch_dtype") or "bfloat16"
    return str(said)


def _num_window_layers(fields: _Fields) -> int:
    """How many layers attend to a window. Raises ShapeError for layers that keep other state than
    keys and values."""
    num_layers = fields.number("num_hidden_layers")
    kinds = fields.values.get("layer_types")
    other = sorted(set(kinds or ()) - {"full_attention", "sliding_attention"})
    if other:
        raise ShapeError(
            f"{fields.source}: layer_types has {other[0]!r}: its state is not keys and values of "
            "each token, so a prefix of it cannot be kept as blocks"
        )
    window = fields.values.get("sliding_window")
    unused = fields.values.get("use_sliding_window") is False
    if not window or unused or window >= fields.number("max_position_embeddings"):
        return 0
    if kinds:
        return list(kinds).count("sliding_attention")
    kind = fields.text("model_type")
    period = fields.number("sliding_window_pattern", _PERIODS.get(kind, 0), least=0)
    if period:
        return num_layers - num_layers // period
    if kind.startswith("qwen"):
        return num_layers - min(num_layers, fields.number("max_window_layers", least=0))
    return num_layers


def _num_params(fields: _Fields) -> tuple[int, int]:
    """All parameters, and those that one token passes through."""
    hidden, num_layers = fields.number("hidden_size"), fields.number("num_hidden_layers")
    kind = fields.text("model_type")
    tied = bool(fields.values.get("tie_word_embeddings", kind in _TIED))
    embedding = fields.number("vocab_size") * hidden * (1 if tied else 2)
    shared = embedding + num_layers * _attention_params(fields, hidden)
    experts = fields.first(("n_routed_experts", "num_local_experts", "num_experts"))
    if not experts:
        total = shared + num_layers * 3 * hidden * fields.number("intermediate_size")
        return total, total
    num_sparse = _num_expert_layers(fields, num_layers)
    if num_sparse < num_layers:
        shared += (num_layers - num_sparse) * 3 * hidden * fields.number("intermediate_size")
    width = fields.first(("moe_intermediate_size", "intermediate_size"))
    always = fields.number("n_shared_experts", 0, least=0) * width
    always += fields.number("shared_expert_intermediate_size", 0, least=0)
    shared += num_sparse * hidden * (3 * always + experts)  # and the router
    one = num_sparse * 3 * hidden * width
    return shared + experts * one, shared + fields.number("num_experts_per_tok") * one


def _attention_params(fields: _Fields, hidden: int) -> int:
    """Of one layer."""
    heads = fields.number("num_attention_heads")
    if "kv_lora_rank" not in fields.values:
        kv_heads = fields.number("num_key_value_heads", heads)
        return 2 * hidden * _head_size(fields) * (heads + kv_heads)
    nope, rope = fields.number("qk_nope_head_dim"), fields.number("qk_rope_head_dim")
    value, latent = fields.number("v_head_dim"), fields.number("kv_lora_rank")
    queries = heads * (nope + rope)
    rank = fields.number("q_lora_rank", 0, least=0)
    asking = rank * (hidden + queries) if rank else hidden * queries
    keeping = hidden * (latent + rope) + latent * heads * (nope + value)
    return asking + keeping + heads * value * hidden


def _num_expert_layers(fields: _Fields, num_layers: int) -> int:
    """The layers whose MLP is one of experts."""
    first = fields.number("first_k_dense_replace", 0, least=0)
    step = fields.number("decoder_sparse_step", fields.number("moe_layer_freq", 1))
    dense = set(fields.values.get("mlp_only_layers") or ())
    is_qwen = "decoder_sparse_step" in fields.values
    return sum(
        (layer + is_qwen) % step == 0 and layer >= first and layer not in dense
        for layer in range(num_layers)
    )
