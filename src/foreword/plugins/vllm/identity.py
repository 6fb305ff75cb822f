"""What the KV of a vLLM engine depends on, from that engine's own configuration."""

import json
import logging
import os
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from vllm.platforms import current_platform

from foreword.core.identity import Identity
from foreword.store.files import digest_of, digest_of_weights

log = logging.getLogger("foreword.plugins")


def engine_config() -> Any:
    """The VllmConfig of the engine that is being built. vLLM hands a tier a short form of it which
    lacks the revision, quantisation and RoPE; the whole one is with whoever builds the connector.
    Raises LookupError."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if hasattr(found, "model_config") and hasattr(found, "kv_transfer_config"):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise LookupError("no engine is being built here")


def identify(engine: Any, offloading: Any, lora_folders: list[str]) -> Identity:
    """`engine`: a VllmConfig; `offloading`: the OffloadingConfig made from it. Raises OSError or
    ValueError where the weights cannot be told."""
    model = engine.model_config
    groups = [(group.group_id, group.tokens_per_block) for group in offloading.groups]
    layout = {
        "engine": f"vllm {version('vllm')}",
        "kv": offloading.kv_cache_layout,
        "canonical": offloading.canonical_layout,
        "replicated": offloading.replicated_layout,
        "groups": groups,
        "blocks": offloading.cache.blocks_per_chunk,
        "bytes": offloading.worker_kv_bytes_per_block,
        "attention": _attention(engine.attention_config),
        "unquantised": sorted(map(str, engine.cache_config.kv_cache_dtype_skip_layers)),
    }
    parallel = offloading.parallel
    shards = {
        name: getattr(parallel, name)
        for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    }
    shards["interleave"] = engine.parallel_config.cp_kv_cache_interleave_size
    return Identity(
        weights=_weights(engine),
        dtype=offloading.model.dtype,
        num_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        attention=_canonical(_architecture(model.hf_config)),
        layout=_canonical(layout),
        parallel=_canonical(shards),
        lora=_adapters(engine, lora_folders),
        block_size=groups[0][1] * offloading.cache.blocks_per_chunk,
        tokenizer="",
        chat_template="",
        numerics="",
    )


def _attention(config: Any) -> list[str]:
    """What vLLM's choice of a backend depends on: each has an order of its own within a block, on
    a CPU one for each kind of instructions."""
    device = [current_platform.get_device_capability()]
    if current_platform.is_cpu():
        cpu = torch.cpu.get_capabilities()
        device = [cpu.get("architecture"), cpu.get("amx_tile")]
    return [str(part) for part in (config.backend, config.backend_per_kind, *device)]


def _weights(engine: Any) -> str:
    """Of all models whose KV is in a block, and how they are quantised as they are loaded."""
    model = engine.model_config
    if engine.load_config.load_format == "dummy":
        raise ValueError("the weights are random: --load-format dummy")
    cache = engine.load_config.download_dir  # None: the hub's own
    parts = [
        _digest(model.model, model.revision, cache),
        str(model.dtype),
        str(model.quantization),
        str(model.hf_overrides),
    ]
    draft = engine.speculative_config and engine.speculative_config.draft_model_config
    if draft:
        parts.append(_digest(draft.model, draft.revision, cache))
    return sha256(json.dumps(parts).encode()).hexdigest()


def _digest(model: str, revision: str | None, cache: str | None) -> str:
    path = Path(model)
    if path.is_file():
        return digest_of(path)
    if path.is_dir():
        return digest_of_weights(path)
    from huggingface_hub import snapshot_download

    # They are on this machine already: the workers have loaded them.
    return digest_of_weights(
        Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    )


def _architecture(config: Any) -> dict[str, Any]:
    """All that the model's configuration says, but for what names and versions change."""
    known: dict[str, Any] = config.to_dict()
    return {
        name: value
        for name, value in known.items()
        if name not in ("_name_or_path", "transformers_version")
    }


def _adapters(engine: Any, folders: list[str]) -> str:
    """vLLM's keys tell adapters apart by name and path, not by their bytes. So those bytes must be
    known, or nothing is shared with other processes."""
    if engine.lora_config is None:
        return ""
    if folders and not os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        return sha256("".join(map(_adapter, folders)).encode()).hexdigest()
    log.warning(
        "blocks are kept for this process only: list the folders of all LoRA adapters as "
        "lora_folders, and load none at run time, to have them found again"
    )
    return f"of one process: {token_hex(16)}"


def _adapter(folder: str) -> str:
    """Its configuration scales what its weights do."""
    config = Path(folder) / "adapter_config.json"
    return _digest(folder, None, None) + (digest_of(config) if config.is_file() else "")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
