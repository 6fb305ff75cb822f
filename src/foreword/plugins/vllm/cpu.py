"""vLLM's tiers behind its KV cache, on machines without an accelerator too.

vLLM's own specification refuses them, though only the copies between its KV cache and the tier in
host memory need one. Here those copies are plain ones. The interfaces are those of vLLM 0.32.0 in
vllm/v1/kv_offload: base.py, cpu/spec.py, tiering/spec.py.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class ForewordCPUSpec(TieringOffloadingSpec):
    """vLLM's TieringOffloadingSpec, and on any accelerator nothing else."""

    _worker: Any

    def get_manager(self) -> Any:
        """The scheduler's side. vLLM makes it when every worker has its side, so nobody needs the
        shared memory's name any more: without a name, no way to end the engine leaves it behind."""
        manager = super().get_manager()
        region = self._scheduler_mmap
        # Who made the file came first: were it the scheduler, the workers would still look for it.
        if current_platform.is_cpu() and region is not None and not region._creator:
            Path(region.mmap_path).unlink(missing_ok=True)
        return manager

    def get_worker(self, kv_caches: Any) -> Any:
        """Raises ValueError for what plain copies cannot do."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            if self.config.canonical_layout:
                raise ValueError("canonical_layout needs an accelerator: leave it out on a CPU")
            if self.num_chunks == 0:
                raise ValueError(
                    f"cpu_bytes_to_use is less than one chunk, {self.kv_bytes_per_chunk} bytes"
                )
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                # Replicated ranks have the same bytes and share one place for them.
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = PlainWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker


# A layer's pages in the KV cache, (blocks, bytes), and in the region, (chunks, blocks per chunk,
# bytes), and a page's bytes without its padding.
_Layer = tuple[NDArray[np.int8], NDArray[np.int8], int]


class PlainWorker(OffloadingWorker):
    """Copies blocks between the KV cache and the region, each job at once in the caller's thread:
    on a CPU both are main memory, and another thread would take its time from the same cores."""

    def __init__(self, kv_caches: Any, region: Any, blocks_per_chunk: int) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._layers: list[list[_Layer]] = []  # by KV cache group
        pages = []
        for cache in kv_caches.tensors:
            page_bytes = cache.page_size_bytes
            blocks = cache.tensor.view(torch.int8).view(-1, page_bytes).numpy()
            chunks = region.create_next_worker_view(page_bytes * blocks_per_chunk)
            pages.append((blocks, chunks.unflatten(1, (blocks_per_chunk, page_bytes)).numpy()))
        for refs in kv_caches.group_data_refs:
            self._layers.append([(*pages[ref.tensor_idx], ref.page_size_bytes) for ref in refs])
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        begin, num_bytes = time.perf_counter(), 0
        for layers, block, chunk, place in self._blocks(src_spec, dst_spec.block_ids):
            for blocks, chunks, page_bytes in layers:
                chunks[chunk, place, :page_bytes] = blocks[block, :page_bytes]
                num_bytes += page_bytes
        return self._done(job_id, num_bytes, begin)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        begin, num_bytes = time.perf_counter(), 0
        for layers, block, chunk, place in self._blocks(dst_spec, src_spec.block_ids):
            for blocks, chunks, page_bytes in layers:
                blocks[block, :page_bytes] = chunks[chunk, place, :page_bytes]
                num_bytes += page_bytes
        return self._done(job_id, num_bytes, begin)

    def _blocks(
        self, device: Any, chunk_ids: Sequence[int]
    ) -> Iterator[tuple[list[_Layer], int, int, int]]:
        """Each block of a job: its group's layers, its index in the KV cache, its chunk and its
        place there. A group's blocks follow each other in a sequence from `block_indices` on, and
        so may begin and end inside a chunk; each group has chunks of its own."""
        block_ids, chunks = iter(device.block_ids.tolist()), 0
        groups = zip(device.group_sizes, device.block_indices, self._layers, strict=True)
        for num_blocks, first, layers in groups:
            place = first % self._blocks_per_chunk
            for at in range(place, place + num_blocks):
                chunk = chunks + at // self._blocks_per_chunk
                yield layers, next(block_ids), int(chunk_ids[chunk]), at % self._blocks_per_chunk
            if num_blocks:
                chunks += -(-(place + num_blocks) // self._blocks_per_chunk)
        assert chunks == len(chunk_ids)

    def _done(self, job_id: int, num_bytes: int, begin: float) -> bool:
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=num_bytes,
                transfer_time=time.perf_counter() - begin,
            )
        )
        return True

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every job is done when it has been submitted."""

    def shutdown(self) -> None:
        self._layers.clear()  # before the memory that they lie in
        if not Path(self._region.mmap_path).exists():
            self._region._creator = False  # its name is gone already: nothing left to remove
        self._region.cleanup()
