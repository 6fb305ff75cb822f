"""What SGLang serves: all that the bytes of a page depend on, besides its tokens.

SGLang's page keys are a SHA-256 chain over token ids, seeded with a request's `cache_salt` and
`extra_key` (which ends in the adapter's id). They know nothing of weights, dtype or layout, and the
id of an adapter of `--lora-paths` is made of its name and path: what else matters is here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_context, get_lora, get_model, get_spec

from foreword.core.identity import Identity
from foreword.store.files import digest_of, digest_of_weights

# Attributes of SGLang's host pools, where a pool has them, that say what lies where in a page.
_GEOMETRY = (
    "layout",
    "page_size",
    "size_per_token",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "head_group_num",
    "kv_cache_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "index_head_dim",
    "storage_format_tag",
)
# Of SGLang's own settings, those that change numbers in the KV without another file being read.
_NUMBERS = ("dtype", "load_format", "quantization", "kv_cache_dtype", "json_model_override_args")


@dataclass(frozen=True, slots=True)
class Served:
    """As SGLang's settings have it. Paths are folders, files or names of the hub."""

    model: str
    revision: str | None = None
    draft: str | None = None
    draft_revision: str | None = None
    kv_scales: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()  # id and path
    numbers: tuple[tuple[str, str], ...] = ()  # setting and value
    fetched: str | None = None  # where models of the hub are; None: the hub's own folder

    @classmethod
    def by(cls, storage_config: HiCacheStorageConfig) -> "Served":
        """What this process serves. Outside a server there are no settings: then the name that
        the storage was given is the model's folder. Served names are none of our business."""
        if not get_context().is_config_namespace_published("model"):
            return cls(storage_config.model_name or "")
        model, spec = get_model(), get_spec()
        return cls(
            model.model_path,
            model.revision,
            spec.speculative_draft_model_path,
            spec.speculative_draft_model_revision,
            model.quantization_param_path,
            tuple(sorted((ref.lora_id, ref.lora_path) for ref in get_lora().lora_paths or ())),
            tuple((name, str(getattr(model, name))) for name in _NUMBERS),
            model.download_dir,
        )


def identify(
    served: Served, storage_config: HiCacheStorageConfig, pool_name: str, pool: Any
) -> Callable[[], Identity]:
    """What tells this pool's pages from all others; the digests are made when it is called.
    Raises OSError
    or ValueError then, where the weights cannot be told."""
    geometry = {name: getattr(pool, name) for name in _GEOMETRY if hasattr(pool, name)}
    layout = {
        "engine": f"sglang {version('sglang')}",
        "pool": str(pool_name),
        "kind": type(pool).__name__,
        **geometry,
    }
    parallel = _parallel(storage_config, pool_name, pool)
    return partial(_identity, served, str(pool.dtype), layout, parallel)


def _identity(served: Served, dtype: str, layout: dict[str, Any], parallel: str) -> Identity:
    if dict(served.numbers).get("load_format") == "dummy":
        raise ValueError("the weights are random: --load-format dummy")
    stored = dtype.removeprefix("torch.")
    # A pool calls every kind of fp8 uint8; the setting says which it is.
    logical = dict(served.numbers).get("kv_cache_dtype", "auto")
    config = _config_digest(_local(served.model, served.revision, served.fetched) / "config.json")
    attention = {"config": config, **dict(served.numbers)}
    if served.kv_scales is not None:
        attention["kv_scales"] = digest_of(Path(served.kv_scales))
    return Identity(
        weights=_weights(served),
        dtype=stored if logical == "auto" else f"{stored} {logical}",
        num_layers=layout.get("layer_num", 0),
        num_kv_heads=layout.get("head_num", 0),
        head_size=layout.get("head_dim", layout.get("kv_cache_dim", 0)),
        attention=json.dumps(attention, sort_keys=True),
        layout=json.dumps(layout, sort_keys=True, default=str),
        parallel=parallel,
        lora=_together([name + _adapter(path) for name, path in served.adapters]),
        block_size=layout["page_size"],
        tokenizer="",
        chat_template="",
        numerics="",
    )


def _parallel(storage_config: HiCacheStorageConfig, pool_name: str, pool: Any) -> str:
    """Which part of the model's KV this process holds. MLA's latents are the same on each rank of
    tensor parallelism, and only the first of them stores; heads and Mamba's states are not."""
    config = storage_config
    own = (
        not config.is_mla_model
        or pool_name == PoolName.MAMBA
        or isinstance(pool, MHATokenToKVPoolHost)
    )
    parts = {
        "tp": (config.tp_rank, config.tp_size) if own else None,
        "pp": (config.pp_rank, config.pp_size),
        "cp": (config.attn_cp_rank, config.attn_cp_size),
        "dcp": (config.dcp_rank, config.dcp_size),
    }
    return json.dumps(parts, sort_keys=True)


def _weights(served: Served) -> str:
    """A draft model's KV lies in a pool of its own or behind the model's own layers."""
    own = _digest(_local(served.model, served.revision, served.fetched))
    if served.draft is None:
        return own
    draft = _local(served.draft, served.draft_revision, served.fetched)
    return _together([own, _digest(draft)])


def _together(digests: list[str]) -> str:
    return sha256("".join(digests).encode()).hexdigest() if digests else ""


def _digest(path: Path) -> str:
    return digest_of(path) if path.is_file() else digest_of_weights(path)


def _adapter(name: str) -> str:
    """Its configuration scales what its weights do."""
    path = _local(name, None, None)
    return _digest(path) + _config_digest(path / "adapter_config.json")


def _config_digest(config: Path) -> str:
    return digest_of(config) if config.is_file() else ""


def _local(name: str, revision: str | None, fetched: str | None) -> Path:
    """Where a model's files are; SGLang has fetched what is of the hub."""
    path = Path(name)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(name, revision=revision, cache_dir=fetched, local_files_only=True)
    )
