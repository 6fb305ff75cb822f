"""Load a model so that its KV can be paged and shared, or say why it cannot."""

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as library_logging

from foreword.core.identity import Identity
from foreword.core.request import ToolStyle
from foreword.engine.attention import IMPLEMENTATION
from foreword.engine.decoder import fuse
from foreword.engine.kv import LayerShape, block_bytes, cache_argument
from foreword.engine.linear import pack
from foreword.engine.quantised import Quantised, quantise_layers
from foreword.engine.settings import check_quantisation
from foreword.engine.source import DEFAULT_MODEL, ModelNotFound, ModelRefused, find_model
from foreword.store.files import digest_of_weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LAYOUT = "layer,keys|values,token,kv_head,head_size"
_PROBE = "foreword_probe"
_SHARED_LAYERS = {"full_attention", "sliding_attention"}
# RoPE whose frequencies depend on the length of the whole sequence: one prefix, many KVs.
_LENGTH_ROPE = {"dynamic", "longrope"}
# Said in config.json, yet no part of what a block's bytes depend on.
_NAMES = {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"}
_log = logging.getLogger("foreword.model")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run on the paged pool, and what the server must know of it."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    name: str
    folder: Path
    max_model_len: int  # tokens
    layers: tuple[LayerShape, ...]
    eos_token_ids: frozenset[int]
    special_token_ids: frozenset[int]
    quantised: Quantised | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.module.config.get_text_config().vocab_size)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of the pool."""
        return block_bytes(self.layers, block_size, self.module.dtype)

    def identity(self, block_size: int, numerics: str = "") -> Identity:
        """What this model's blocks depend on. Reads the weight files when first asked."""
        config = json.loads((self.folder / "config.json").read_text())
        kept = {name: value for name, value in config.items() if name not in _NAMES}
        first = self.layers[0]
        return Identity(
            weights=self._weights(),
            dtype=str(self.module.dtype).removeprefix("torch."),
            num_layers=len(self.layers),
            num_kv_heads=first.num_kv_heads,
            head_size=first.key_size,
            # All of it: a norm's epsilon changes keys as surely as a RoPE base does.
            attention=json.dumps(kept, sort_keys=True, separators=(",", ":")),
            layout=LAYOUT,
            parallel="",
            lora="",
            block_size=block_size,
            tokenizer=sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            chat_template=sha256(str(self.tokenizer.chat_template).encode()).hexdigest(),
            numerics=numerics,
        )

    def token_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    @property
    def end_token_id(self) -> int | None:
        """The token that ends an answer; where there are several, the tokenizer's own."""
        own: int | None = self.tokenizer.eos_token_id
        if own in self.eos_token_ids or not self.eos_token_ids:
            return own
        return min(self.eos_token_ids)

    @property
    def tool_style(self) -> ToolStyle | None:
        """How the model writes tool calls, as its chat template shows; None where that has none."""
        template = str(self.tokenizer.chat_template)
        if not re.search(r"\btools\b", template):
            return None
        return "tagged" if "<tool_call>" in template else "bare"

    @cached_property
    def longest_token(self) -> int:
        """Characters (in byte-level tokenizers bytes) of the longest token."""
        return max(len(token) for token in self.tokenizer.get_vocab())

    def _weights(self) -> str:
        if self.quantised is None:
            return self._weights_digest
        return sha256(f"{self._weights_digest};{self.quantised.scheme}".encode()).hexdigest()

    @cached_property
    def _weights_digest(self) -> str:
        return digest_of_weights(self.folder)


def load_model(
    source: str = DEFAULT_MODEL,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    max_model_len: int | None = None,
    quantise: str | None = None,
) -> LoadedModel:
    """Load "smollm2", a Hugging Face folder, a GGUF file or ORG/NAME of the hub.

    `max_model_len` (tokens) may exceed what the model was trained for; that is logged.
    `quantise`: "int4" or "int8" weights, for bfloat16 on the CPU.
    Raises ModelNotFound, ModelRefused for a model whose KV cannot be shared, or ValueError for what
    cannot be chosen together.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if quantise is not None:
        check_quantisation(quantise, dtype, device)
    library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder, name = find_model(source)
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(folder),
        "local_files_only": True,
    }
    loading: dict[str, Any] = {}
    try:
        config = AutoConfig.from_pretrained(**where)
        refuse_by_config(config)
        tokenizer: Any = AutoTokenizer.from_pretrained(**where)
        load: Any = AutoModelForCausalLM.from_pretrained
        module, loading = load(
            **where,
            dtype=DTYPES[dtype],
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
        )
    except ModelRefused:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelNotFound(
            f"the model in {folder} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    if missing := sorted(loading["missing_keys"]):  # the library would draw them at random
        raise ModelNotFound(
            f"the model in {folder} has no weights for {missing[0]} and {len(missing) - 1} more"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ModelRefused(f"{folder} has no fast tokenizer (tokenizer.json)")
    module.to(device).eval().requires_grad_(False)
    layers = probe_layers(module)
    fuse(module)
    quantised = quantise_layers(module, quantise) if quantise else None
    pack(module)
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        name=name,
        folder=folder,
        max_model_len=_model_len(config.get_text_config(), max_model_len),
        layers=layers,
        eos_token_ids=_eos(module, tokenizer),
        special_token_ids=frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        ),
        quantised=quantised,
    )


def refuse_by_config(config: Any) -> None:
    """Raise ModelRefused for what a config shows: state that is not per-token KV, and keys that
    depend on more than the tokens before them."""
    text = config.get_text_config()
    name = str(config.model_type)
    reasons = {
        "is an encoder-decoder": bool(config.is_encoder_decoder),
        "soft-caps attention scores": bool(getattr(text, "attn_logit_softcapping", None)),
        "masks attention in chunks": bool(getattr(text, "attention_chunk_size", None)),
        "attends in both directions": getattr(text, "is_causal", True) is False,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelRefused(f"{name} cannot share KV blocks: it {reason}")
    layer_types = set(getattr(text, "layer_types", None) or ())
    if other := sorted(layer_types - _SHARED_LAYERS):
        raise ModelRefused(f"{name} cannot share KV blocks: it has {', '.join(other)} layers")
    ropes = _rope_types(getattr(text, "rope_parameters", None))
    if other := sorted(ropes & _LENGTH_ROPE):
        raise ModelRefused(
            f"{name} cannot share KV blocks: {', '.join(other)} RoPE changes earlier keys as the "
            "sequence grows"
        )


def _rope_types(parameters: Any) -> set[str]:
    """All rope_type values of a config, which may nest them by layer type."""
    if not isinstance(parameters, dict):
        return set()
    nested = set().union(*(_rope_types(value) for value in parameters.values()), set())
    return nested | {str(parameters.get("rope_type", "default"))}


def _model_len(config: Any, wanted: int | None) -> int:
    trained: int | None = getattr(config, "max_position_embeddings", None)
    if wanted is not None and wanted < 1:
        raise ValueError(f"max_model_len must be at least 1 token, not {wanted}")
    if trained is not None and trained < 1:
        raise ModelRefused(f"{config.model_type} says that it has {trained} positions")
    if trained is None or (wanted is not None and wanted <= trained):
        return wanted or 2048
    if wanted is None:
        return trained
    if not _rope_types(getattr(config, "rope_parameters", None)):
        raise ModelRefused(
            f"{config.model_type} has a table of {trained} positions: "
            f"max_model_len cannot be {wanted}"
        )
    _log.warning(
        "max_model_len %d is more than the %d positions that the model was trained for: "
        "expect poor text beyond",
        wanted,
        trained,
    )
    return wanted


def _eos(module: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    config = module.config.get_text_config().eos_token_id
    generation = getattr(module.generation_config, "eos_token_id", None)
    found: set[int] = set()
    for ids in (config, generation, tokenizer.eos_token_id):
        found.update(ids if isinstance(ids, Iterable) else () if ids is None else (ids,))
    return frozenset(found)


class _ProbeCache(Cache):
    """Remembers what each layer wanted to store."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers = []
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.stored[layer_idx] = key_states, value_states
        return key_states, value_states


@torch.inference_mode()
def probe_layers(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Run two tokens to see what each layer stores and how it calls attention.

    Raises ModelRefused where that is more, or other, than per-token keys and values.
    """
    name = str(module.config.model_type)
    cache, shapes = _ProbeCache(), dict[int, LayerShape]()

    def attention(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        index = layer.layer_idx
        stored = cache.stored.get(index)
        if stored is None or stored[0] is not key or stored[1] is not value:
            raise ModelRefused(f"{name} cannot share KV blocks: it stores no plain keys and values")
        for extra, what in (("softcap", "soft-caps attention scores"), ("s_aux", "has sinks")):
            if kwargs.get(extra) is not None:
                raise ModelRefused(f"{name} cannot share KV blocks: its attention {what}")
        window = kwargs.get("sliding_window")
        shapes[index] = LayerShape(key.shape[1], key.shape[3], value.shape[3], window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_PROBE, attention)
    module.set_attn_implementation(_PROBE)
    try:
        ids = torch.tensor([[0, 1]], device=module.device)
        module(input_ids=ids, position_ids=ids, use_cache=True, **{cache_argument(module): cache})
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    if sorted(shapes) != list(range(module.config.get_text_config().num_hidden_layers)):
        raise ModelRefused(f"{name} cannot share KV blocks: not every layer has its own KV")
    return tuple(shapes[index] for index in sorted(shapes))
