"""vLLM's own offloading manager with our tier, and memory in place of a model's KV."""

import time
import warnings
from hashlib import sha256
from types import SimpleNamespace
from uuid import uuid4

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    from vllm.v1.kv_offload import config as offloading
    from vllm.v1.kv_offload.base import (
        LookupResult,
        ReqContext,
        ScheduleEndContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNK = 16  # tokens
CHUNK_BYTES = 8192


def content(key: bytes) -> bytes:
    return (sha256(key).digest() * (CHUNK_BYTES // 32 + 1))[:CHUNK_BYTES]


def keys_of(name: str, count: int, group: int = 0) -> list[bytes]:
    return [
        make_offload_key(sha256(f"{name} {at}".encode()).digest(), group) for at in range(count)
    ]


def engine_of(weights, lora=None):
    """As much of a VllmConfig as an Identity is made from."""
    text = SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "_name_or_path": str(weights)})
    model = SimpleNamespace(
        model=str(weights), revision=None, dtype="bfloat16", quantization=None, hf_overrides={},
        max_model_len=64,
        hf_config=text, get_total_num_hidden_layers=lambda: 2,
        get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 8,
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[]),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        speculative_config=None,
        lora_config=lora,
        kv_transfer_config=None,
    )


class Engine:
    """vLLM's manager of a CPU tier of `num_chunks`, with our tier below it."""

    def __init__(self, vllm_config, num_chunks, settings, dtype="bfloat16", groups=1):
        extra = {
            "cpu_bytes_to_use": num_chunks * CHUNK_BYTES * groups,
            "secondary_tiers": [
                {"type": "ForewordTier", "module_path": "foreword.plugins.vllm", **settings}
            ],
        }
        ones = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
        config = offloading.OffloadingConfig(
            groups=tuple(
                offloading.OffloadingGroupConfig(CHUNK, (f"layer {at}",), at)
                for at in range(groups)
            ),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config=extra,
            engine_id=f"test-{uuid4()}",
            model=offloading.OffloadingModelConfig("tiny", dtype),
            cache=offloading.OffloadingCacheConfig(CHUNK, 1),
            parallel=offloading.OffloadingParallelConfig(
                rank=0, data_parallel_index=0, data_parallel_size=1,
                data_parallel_rank_local=None, is_parallelism_agnostic=True, **ones,
            ),
        )  # fmt: skip
        self.spec = TieringOffloadingSpec(config)
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        assert self.tier._cache.wait_open(10)
        self.rows = memoryview(self.manager.primary_tier.get_kv_memoryview()).cast("B")
        self.stride = len(self.rows) // len(self.manager.primary_tier.get_kv_memoryview())
        self.num_requests = 0

    def close(self):
        self.rows.release()
        self.manager.shutdown()

    def request(self, keys, params=None):
        self.num_requests += 1
        context = ReqContext(str(self.num_requests), params)
        positions = {}
        for key in keys:
            positions[key[-4:]] = positions.get(key[-4:], 0) + CHUNK
            context.set_offload_key_position(key, positions[key[-4:]])
        self.manager.on_new_request(context)
        return context

    def step(self):
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def rest(self):
        """Step until vLLM has nothing left to wait for."""
        end = time.monotonic() + 10
        while self.manager.has_pending_work():
            assert time.monotonic() < end, "it never comes to rest"
            self.step()
            time.sleep(0.001)

    def row(self, chunk):
        return self.rows[chunk * self.stride : chunk * self.stride + CHUNK_BYTES]

    def store(self, keys, params=None):
        """A request whose KV was all computed."""
        context = self.request(keys, params)
        output = self.manager.prepare_store(keys, context)
        if output is not None and output.keys_to_store:
            for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
                self.row(int(chunk))[:] = content(key)
            self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.rest()
        assert self.tier._cache.flush(10)

    def restore(self, keys):
        """How many chunks a request finds, from the first on, as vLLM's connector asks. Their
        bytes are right."""
        context = self.request(keys)
        begin = time.monotonic()
        while (hits := self._prefix(keys, context)) is None:
            assert time.monotonic() - begin < 5, "it never ends"
            self.step()
            time.sleep(0.001)
        spec = self.manager.prepare_load(keys[:hits], context)
        for key, chunk in zip(keys, spec.chunk_ids, strict=False):
            assert self.row(int(chunk)) == content(key), "wrong bytes are served"
        sources = {self.manager.get_load_source(key, context) for key in keys[:hits]}
        self.manager.complete_load(keys[:hits], context)
        self.manager.on_request_finished(context)
        self.rest()
        return hits, sources

    def _prefix(self, keys, context):
        hits, deferred = 0, False
        for key in keys:
            result = self.manager.lookup(key, context)
            if result is LookupResult.MISS:
                break
            hits += result is not LookupResult.RETRY
            deferred |= result is not LookupResult.HIT
        return None if deferred else hits


def counted(engine):
    """Blocks by event, as vLLM's /metrics gets them."""
    counts = engine.tier.get_stats().data["data"]
    return {
        name.rpartition("_")[2]: sum(values.values())
        for name, values in counts.items()
        if "_blocks_" in name
    }


def evict(engine):
    """Fill vLLM's CPU tier with something else."""
    num_chunks = len(engine.rows) // engine.stride
    engine.store(keys_of(f"other {engine.num_requests}", num_chunks))
