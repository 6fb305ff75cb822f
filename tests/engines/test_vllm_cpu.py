"""vLLM's tiers on a CPU by our specification: what it evicts comes back, byte for byte."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec as Chunks,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from foreword.plugins.vllm.cpu import PlainWorker
from vllm_server import TINY_FLAGS, VllmServer, cached_tokens

PAGE_BYTES = (64, 96)  # of two KV tensors
NUM_BLOCKS, NUM_CHUNKS = 12, 5
FOREWORD = (sys.executable, "-m", "foreword.cli.main", "serve", "--engine", "vllm")
FOREWORD += ("--disk", "0", "--host-bytes", "256MiB")
PROMPTS = [[(11 * prompt + 7 * i * i + i) % 500 + 3 for i in range(400)] for prompt in range(4)]


def test_what_vllm_evicts_comes_back_also_after_a_restart(
    start_vllm: Callable[..., VllmServer], tiny_model: Path, tmp_path: Path
) -> None:
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "ForewordCPUSpec",
            "spec_module_path": "foreword.plugins.vllm",
            "cpu_bytes_to_use": 16 * 32 * 1024,  # 16 blocks
            "blocks_per_chunk": 2,
            "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "kv")}],
        },
    }
    flags = (*TINY_FLAGS, "--kv-transfer-config", json.dumps(config))
    server = start_vllm(tiny_model, *flags)
    cold, warm = server.complete(PROMPTS[0]), server.complete(PROMPTS[0])
    assert cached_tokens(cold) == 0
    assert cached_tokens(warm) == 384
    for prompt in PROMPTS[1:]:  # neither the device nor host memory has room for all
        assert cached_tokens(server.complete(prompt)) == 0
    restored = server.complete(PROMPTS[0])
    assert cached_tokens(restored) == 384
    assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") >= 256
    assert restored["choices"] == warm["choices"]
    assert server.regions() == []
    server.stop(signal.SIGKILL)
    again = start_vllm(tiny_model, *flags).complete(PROMPTS[0])
    assert cached_tokens(again) == 384
    assert again["choices"] == warm["choices"]


def test_foreword_serves_with_vllm_and_keeps_what_it_evicts_in_host_memory(
    start_vllm: Callable[..., VllmServer], smollm2: Path
) -> None:
    """The default model as our own engine converted it."""
    flags = ("--max-model-len", "1024", "--num-gpu-blocks-override", "40")
    server = start_vllm(smollm2, *flags, command=FOREWORD)
    answer = server.complete("The capital of France is", max_tokens=1)
    assert answer["choices"][0]["text"] == " Paris"
    prompts = [(prompt * 2)[:790] for prompt in PROMPTS[:3]]
    cold = server.complete(prompts[0])
    for prompt in prompts[1:]:
        assert cached_tokens(server.complete(prompt)) == 0
    restored = server.complete(prompts[0])
    assert cached_tokens(restored) == 768
    assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="host") >= 256
    assert restored["choices"] == cold["choices"]
    server.stop()
    assert server.regions() == []


class Region:
    """Rows of chunks, in which each tensor takes the next bytes, as vLLM's region gives them."""

    mmap_path = "/nowhere"

    def __init__(self, blocks_per_chunk: int) -> None:
        self.bytes = torch.zeros(
            (NUM_CHUNKS, sum(PAGE_BYTES) * blocks_per_chunk + 32), dtype=torch.int8
        )
        self.taken = 0

    def create_next_worker_view(self, num_bytes: int) -> torch.Tensor:
        begin, self.taken = self.taken, self.taken + num_bytes
        return self.bytes[:, begin : self.taken]


def caches(refs: list[list[tuple[int, int]]]) -> CanonicalKVCaches:
    """KV tensors of random bytes; `refs` are each group's (tensor, bytes of a page in use)."""
    draw = np.random.default_rng(0)
    tensors = [
        torch.from_numpy(draw.integers(-128, 128, (NUM_BLOCKS, size), dtype=np.int8))
        for size in PAGE_BYTES
    ]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
        [[CanonicalKVCacheRef(*ref) for ref in group] for group in refs],
    )


def moved(worker: PlainWorker) -> list[tuple[int, bool, int | None]]:
    return [(done.job_id, done.success, done.transfer_size) for done in worker.get_finished()]


def test_a_chunk_holds_its_blocks_in_order_and_may_be_filled_in_part() -> None:
    kv, region = caches([[(0, 64), (1, 96)]]), Region(3)
    worker = PlainWorker(kv, region, 3)
    # Blocks 4 to 8 of a sequence: the last two of its second chunk and its third.
    blocks = GPULoadStoreSpec([7, 2, 9, 1, 5], [5], [4])
    assert worker.submit_store(1, blocks, Chunks([4, 0]))
    assert moved(worker) == [(1, True, 5 * (64 + 96))]
    assert worker.get_finished() == []
    for begin, cache in ((0, kv.tensors[0]), (3 * 64, kv.tensors[1])):
        size, rows = (
            cache.page_size_bytes,
            region.bytes[:, begin : begin + 3 * cache.page_size_bytes],
        )
        pages = rows.unflatten(1, (3, size))
        assert torch.equal(pages[4, 1:], cache.tensor[[7, 2]])
        assert torch.equal(pages[0], cache.tensor[[9, 1, 5]])
        assert not pages[4, 0].any()
        assert not pages[[1, 2, 3]].any()
    before = [cache.tensor.clone() for cache in kv.tensors]
    # Back into other blocks, from the middle of that second chunk on.
    worker.submit_load(2, Chunks([4, 0]), GPULoadStoreSpec([0, 3], [2], [5]))
    worker.wait({2})
    assert moved(worker) == [(2, True, 2 * (64 + 96))]
    for cache, old in zip(kv.tensors, before, strict=True):
        assert torch.equal(cache.tensor[[0, 3]], old[[2, 9]])
        rest = [block for block in range(NUM_BLOCKS) if block not in (0, 3)]
        assert torch.equal(cache.tensor[rest], old[rest])


def test_each_group_has_its_own_layers_and_chunks() -> None:
    kv, region = caches([[(0, 64)], [(1, 80)], [(1, 96)]]), Region(2)
    worker = PlainWorker(kv, region, 2)
    blocks = GPULoadStoreSpec([3, 4, 8], [2, 0, 1], [1, 0, 3])
    worker.submit_store(1, blocks, Chunks([0, 1, 2]))
    assert moved(worker) == [(1, True, 2 * 64 + 96)]
    first, second = region.bytes[:, :128], region.bytes[:, 128:320]
    assert torch.equal(first[0, 64:], kv.tensors[0].tensor[3])
    assert torch.equal(first[1, :64], kv.tensors[0].tensor[4])
    assert torch.equal(second[2, 96:], kv.tensors[1].tensor[8])
    assert int((region.bytes != 0).sum()) == int(
        (kv.tensors[0].tensor[[3, 4]] != 0).sum() + (kv.tensors[1].tensor[8] != 0).sum()
    )


def test_padding_of_a_page_is_not_copied() -> None:
    kv, region = caches([[(1, 80)]]), Region(1)
    worker = PlainWorker(kv, region, 1)
    worker.submit_store(1, GPULoadStoreSpec([6], [1], [0]), Chunks([2]))
    assert moved(worker) == [(1, True, 80)]
    page = region.bytes[2, 64:160]
    assert torch.equal(page[:80], kv.tensors[1].tensor[6, :80])
    assert not page[80:].any()
