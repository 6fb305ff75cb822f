"""SGLang's own pools, storage factory and radix cache, run where there is no GPU.

Nothing of SGLang is changed but what needs a device: packages of kernels that are not installed are
stood in for while it is imported, host memory is not pinned, and one copy between a host pool and
the "device" (the CPU) is done here. Made for SGLang 0.5.23.
"""

import json
import os
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.utils import is_torchvision_available

from foreword.core.stats import TierStats

# What SGLang imports at the top of its files and never calls here.
_NOT_NEEDED = ("triton", "sgl_kernel", "flashinfer", "deep_gemm", "torchvision", "IPython")


class _Anything:
    """A kernel, a decorator of kernels, a type or a constant: whatever a module is asked for."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __init_subclass__(cls, **_: object) -> None: ...

    def __call__(self, *args: object, **_: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else _Anything()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, _: object) -> "_Anything":
        return self


class _Stub(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Stubs(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        missing = name.partition(".")[0] in self.packages
        return ModuleSpec(name, self, is_package=True) if missing else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def without_kernels() -> Iterator[None]:
    """SGLang can be imported in here. Afterwards no other library takes a stub for the real one."""
    stubs = _Stubs([name for name in _NOT_NEEDED if find_spec(name) is None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # These look once what is there, and must see what really is.
        is_torchvision_available()
        import_module("torch._inductor.compile_fx")
        sys.meta_path.append(stubs)
        try:
            yield
        finally:
            sys.meta_path.remove(stubs)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Stub)]:
            del sys.modules[name]


with without_kernels():
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import (
        CacheRequestHandle,
        EvictParams,
        InsertParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageFailureInjector,
    )
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.mem_cache.pool_host.base import HostKVCache
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.mem_cache.utils import get_hash_str
    from sglang.srt.server_args import ServerArgs

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
HEADS, HEAD_SIZE, LAYERS = 2, 32, 2
PAGE = 16  # tokens
NO_KEYS = "SGLang compiles its page hash: that takes g++ and OpenSSL's headers"


def _copy_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


mha.transfer_kv_direct = _copy_rows
HostKVCache.pin_memory = property(lambda self: False, lambda self, wanted: None)


def extra_config(folder: Path, **more: Any) -> dict[str, Any]:
    """As in docs/guide/sglang.md."""
    return {
        "backend_name": "foreword",
        "module_path": "foreword.plugins.sglang",
        "class_name": "ForewordStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "disk_folder": str(folder),
        "disk_bytes": 64 << 20,
        **more,
    }


def device_pool(num_tokens: int = 1024, dtype: torch.dtype = torch.bfloat16) -> Any:
    shape = {"head_num": HEADS, "head_dim": HEAD_SIZE * 2 // dtype.itemsize, "layer_num": LAYERS}
    return MHATokenToKVPool(
        num_tokens, PAGE, dtype, device="cpu", enable_memory_saver=False, **shape
    )


def host_pool(dtype: torch.dtype = torch.bfloat16, layout: str = "layer_first") -> Any:
    """Twice the bytes of a page's numbers per head where a number takes half of them: all host
    pools from here have pages of the same size."""
    pool = device_pool(dtype=dtype)
    return mha.MHATokenToKVPoolHost(
        pool._mha_buffer_info(),
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        device_capacity_tokens=1024,
        start_layer=0,
        end_layer=LAYERS - 1,
    )


def storage(
    pool: Any, model: Path, extra: dict[str, Any], *, backend: str = "dynamic", **config: Any
) -> Any:
    """What SGLang's factory makes of a configuration, with a pool registered as SGLang does."""
    settings = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    settings |= {"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False}
    settings |= {"enable_storage_metrics": True, "is_page_first_layout": False}
    settings |= {"model_name": str(model), "extra_config": extra} | config
    made = StorageBackendFactory.create_backend(backend, HiCacheStorageConfig(**settings), pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def page_keys(tokens: Sequence[int]) -> list[str]:
    """SGLang's own, of full pages."""
    keys: list[str] = get_hash_str(list(tokens), None, PAGE)
    return keys


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, nothing comes too late."""
    monkeypatch.setattr("foreword.plugins.outer.PROBE_S", 20.0)
    monkeypatch.setattr("foreword.plugins.outer.LOAD_S", 20.0)
    monkeypatch.setattr("foreword.plugins.sglang.storage.PROBE_S", 20.0)


def can_make_keys() -> bool:
    """SGLang compiles its hash of pages when it first needs it."""
    try:
        return bool(page_keys(range(PAGE)))
    except RuntimeError:
        return False


def fill(pool: Any, seed: int) -> None:
    """Every bit of a host pool at random, NaN included."""
    random = torch.Generator().manual_seed(seed)
    buffer = pool.kv_buffer.view(torch.uint8)
    buffer.copy_(torch.randint(0, 256, buffer.shape, generator=random, dtype=torch.uint8))


def ours(backend: Any) -> Any:
    return backend._backend if isinstance(backend, HiCacheStorageFailureInjector) else backend


def written(backend: Any) -> None:
    for pages in ours(backend)._pages.values():
        assert pages.cache.flush(10)


def disk(backend: Any, pool: str = "kv") -> TierStats:
    (stats,) = ours(backend).tiers[pool]
    return stats


def damage(folder: Path, find: bytes, change: Callable[[bytearray, int], None]) -> None:
    """Change the bytes of what lies on disk, where `find` is found first."""
    for path in folder.glob("part-*.slots"):
        content = bytearray(path.read_bytes())
        at = content.find(find)
        if at >= 0:
            change(content, at)
            path.write_bytes(content)
            return
    raise AssertionError("not on disk")


def cut(content: bytearray, at: int) -> None:
    content[at + 100 :] = bytes(len(content) - at - 100)


def flip(content: bytearray, at: int) -> None:
    content[at + 77] ^= 4


def write_model(folder: Path) -> Path:
    """A model's folder: nothing here reads the weights but to tell them from others."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(os.urandom(4096))
    return folder


class Server:
    """SGLang's radix cache over a device pool, a host pool and a storage backend: the part of a
    server that keeps KV. One at a time in a process."""

    def __init__(
        self,
        model: Path,
        extra: dict[str, Any],
        num_tokens: int = 1024,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        names = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
        args = ServerArgs(
            model_path=str(model),
            device="cpu",
            page_size=PAGE,
            kv_cache_dtype=names.get(dtype, "auto"),
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_write_policy="write_through",
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
            hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(extra | {"prefetch_threshold": PAGE}),
        )
        self._num_requests = 0
        with without_kernels():  # it imports models' files as it goes
            ranks = runtime_context.SpawnRanks(world_rank=0)
            runtime_context.publish(args, role="scheduler", ranks=ranks)
            self._start(args, num_tokens, dtype)

    def _start(self, args: Any, num_tokens: int, dtype: torch.dtype) -> None:
        self.pool = device_pool(num_tokens, dtype)
        self.allocator = PagedTokenToKVPoolAllocator(
            num_tokens, PAGE, dtype, "cpu", self.pool, False
        )
        requests = ReqToTokenPool(4, num_tokens, "cpu", False)
        params = CacheInitParams(
            False, requests, self.allocator, PAGE, tree_components=(ComponentType.FULL,)
        )
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(args, params)

    @property
    def storage(self) -> Any:
        return self.cache.cache_controller.storage_backend

    def name_weights(self, version: str) -> None:
        """As SGLang notes it after weights were updated at run time."""
        context = runtime_context.get_context()
        context.override("scheduler.weight_version", weight_version=version)

    def prefill(self, tokens: Sequence[int], seed: int, **names: str) -> list[torch.Tensor]:
        """Compute a prompt's KV (at random) and leave it to the cache; returns it by layer."""
        if self.allocator.available_size() < len(tokens):
            self.cache.evict(EvictParams(num_tokens=len(tokens)))
        slots = self.allocator.alloc(len(tokens))
        random = torch.Generator().manual_seed(seed)
        for buffer in self._buffers():
            shape = (len(tokens), *buffer.shape[1:])
            buffer[slots] = torch.randn(shape, generator=random).to(buffer.dtype)
        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens), **names), value=slots))
        assert self.until(lambda: not self.cache.ongoing_write_through)
        assert self.until(lambda: not self.cache.ongoing_backup)
        return [buffer[slots].clone() for buffer in self._buffers()]

    def restore(self, tokens: Sequence[int], **names: str) -> list[torch.Tensor]:
        """What a request with this prompt finds, brought to the device, as its scheduler does it:
        storage to host, host to device. By layer, as many tokens as were found."""
        key = RadixKey(array("q", tokens), **names)
        self._num_requests += 1
        request = CacheRequestHandle(f"request-{self._num_requests}", 0)
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        known = found.device_prefix_len + found.host_hit_length
        node = found.last_host_node
        self.cache.prefetch_from_storage(
            request,
            node,
            array("q", tokens[known:]),
            self.cache.get_last_hash_value(node),
            self.cache.get_prefix_hash_values(node)
            if self.cache.hicache_storage_pass_prefix_keys
            else None,
            matched_prefix_tokens=list(tokens[:known]),
            **names,
        )
        assert self.until(lambda: self.cache.check_prefetch_progress(request))
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        if found.host_hit_length:
            assert self.cache.load_back(found.best_match_node)
            self.cache.ready_to_load_host_cache()
            assert self.until(lambda: not self.cache.ongoing_load_back)
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        root = self.cache.root_node_handle(names.get("extra_key"))
        path = self.cache.tree_core.collect_full_device_indices(found.last_device_node, root)
        slots = path[: found.device_prefix_len]
        return [buffer[slots].clone() for buffer in self._buffers()]

    def until(self, done: Callable[[], bool], timeout_s: float = 20.0) -> bool:
        """Let SGLang's scheduler go round until something is so."""
        end_s = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > end_s:
                return False
            self.cache.flush_pending_backups()
            self.cache.check_hicache_events()
            time.sleep(0.005)
        return True

    def stop(self) -> None:
        self.cache.cache_controller.detach_storage_backend()
        runtime_context.reset_context()

    def _buffers(self) -> list[torch.Tensor]:
        return [*self.pool.k_buffer, *self.pool.v_buffer]
