"""What the KV of a transformers model in memory depends on, besides tokens.

Files say what a model was when it was loaded; training, adapters and casts change it in memory. So
the digest here is of the tensors themselves, and what no digest covers (code that is neither
torch's nor transformers', hooks) makes a model unsafe.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# RoPE whose frequencies depend on nothing but the configuration.
_ROPES = {"default", "linear", "llama3", "proportional", "yarn"}
# Said in a configuration, yet no part of what a block's bytes depend on.
_NAMES = {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"}
_SAMPLES = 16  # elements of each tensor that are looked at in every call
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, slots=True)
class Signs:
    """What is compared at every call, quickly, to notice a model that has changed."""

    attention: str
    versions: tuple[tuple[int, int], ...]  # of each tensor: its place, and torch's count of writes
    samples: bytes


def why_unsafe(model: PreTrainedModel) -> str | None:
    """Why this model's KV must not be kept, to follow "the model"; None: it may."""
    config = model.config
    kinds = {
        "is an encoder-decoder": config.is_encoder_decoder,
        "reads more than text": config.get_text_config(decoder=True) is not config,
        "attends in both directions": getattr(config, "is_causal", True) is False,
        "has a state that is no KV": not _has_plain_cache(model),
        "has a generate of its own": getattr(type(model), "generate", None)
        is not GenerationMixin.generate,
    }
    if reason := next((reason for reason, applies in kinds.items() if applies), None):
        return reason
    if ropes := _rope_types(getattr(config, "rope_parameters", None)) - _ROPES:
        return f"has {min(ropes)} RoPE, which may change earlier keys as the sequence grows"
    attention = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    if attention is not None and not _is_stock(attention):
        return f"has another's attention ({config._attn_implementation})"
    for name, tensor in _tensors(model):
        if type(tensor) not in _PLAIN or tensor.device.type == "meta" or tensor.is_sparse:
            return f"has no plain tensor in {name}"
    return next(filter(None, map(_why_foreign, model.modules())), None)


def attention_of(model: PreTrainedModel) -> str:
    """Canonical JSON of the configuration, the attention's implementation and the code's version:
    a norm's epsilon changes keys as surely as a RoPE base does."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NAMES}
    code = {
        "class": type(model).__qualname__,
        "implementation": model.config._attn_implementation,
        "transformers": transformers.__version__,
    }
    return json.dumps([code, config], sort_keys=True, separators=(",", ":"), default=str)


def signs_of(model: PreTrainedModel) -> Signs:
    tensors = [tensor.detach() for _, tensor in _tensors(model)]
    versions = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)
    looked_at = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        looked_at.append(flat[:: max(1, len(flat) // _SAMPLES)].double().cpu())
    samples = torch.cat(looked_at) if looked_at else torch.empty(0)
    return Signs(attention_of(model), versions, samples.numpy().tobytes())


def digest_of(model: PreTrainedModel) -> str:
    """SHA-256 in hex over all parameters and buffers: names, types, shapes and bytes."""

    def digest(named: tuple[str, Tensor]) -> str:
        name, tensor = named
        octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        head = f"{name};{tensor.dtype};{tuple(tensor.shape)};".encode()
        return sha256(head + sha256(octets.data).digest()).hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return sha256("".join(threads.map(digest, _tensors(model))).encode()).hexdigest()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _has_plain_cache(model: Any) -> bool:
    return bool(model._supports_default_dynamic_cache())


def _is_stock(thing: Any) -> bool:
    """Whether a class or function is defined by torch or transformers themselves."""
    return str(getattr(thing, "__module__", "")).split(".")[0] in ("torch", "transformers")


def _why_foreign(module: nn.Module) -> str | None:
    if not _is_stock(type(module)) or not _is_stock(type(module).forward):
        return f"has modules of {type(module).__module__}.{type(module).__qualname__}"
    if "forward" in vars(module):
        return f"has a replaced forward in {type(module).__qualname__}"
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if not all(map(_is_stock, hooks)):
        return f"has a hook on {type(module).__qualname__}"
    return None


def _rope_types(parameters: Any) -> set[str]:
    """All rope_type values of a configuration, which may nest them by layer type."""
    if not isinstance(parameters, dict):
        return set()
    nested = set().union(*(_rope_types(value) for value in parameters.values()), set())
    return nested | {str(parameters.get("rope_type", "default"))}
