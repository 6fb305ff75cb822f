"""Pages: what is kept of one of SGLang's host pools.

Bytes are a page as the pool flattens it (`get_data_page`). A page goes into the pool only after it
has been verified, on the thread that asked, so nothing that comes late is ever seen there.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foreword.plugins.outer import Block, OuterCache

_STEP_BYTES = 64 << 20  # that lie between a pool and the stores at once


class Pages:
    """A pool's pages by SGLang's keys. For any thread."""

    def __init__(self, pool: Any, cache: OuterCache, sample: torch.Tensor) -> None:
        """`sample`: any page of the pool, flat."""
        self.pool = pool
        self.cache = cache
        self._shape, self._dtype = sample.shape, sample.dtype
        self.page_bytes = sample.nbytes
        self._step = max(1, _STEP_BYTES // max(1, sample.nbytes))
        self._lock = threading.Lock()
        self._transfers: list[tuple[str, int, float]] = []

    def empty(self) -> torch.Tensor:
        """A page's room outside the pool."""
        return torch.empty(self._shape, dtype=self._dtype)

    def num_found(self, blocks: Sequence[Block]) -> int:
        """How many of these there are, from the first on, others' included. They count as used."""
        num_found = self.cache.num_found(blocks)
        self.cache.touch(blocks[:num_found])
        return num_found

    def load(self, blocks: Sequence[Block], host_indices: torch.Tensor | None) -> list[bool]:
        """Into slots of the pool. Nothing is tried after the first that is not there: SGLang uses
        none of those."""
        begin_s = time.monotonic()
        loaded = [False] * len(blocks)
        starts = self._starts(host_indices, len(blocks))
        for at in range(0, len(starts), self._step):
            pages = [self.empty() for _ in blocks[at : at + self._step]]
            there = self.read(blocks[at : at + self._step], pages)
            num_there = there.index(False) if False in there else len(there)
            for offset, page in enumerate(pages[:num_there]):
                self.pool.set_from_flat_data_page(starts[at + offset], page)
                loaded[at + offset] = True
            if num_there < len(pages):
                break
        self._count("prefetch", sum(loaded), begin_s)
        return loaded

    def read(self, blocks: Sequence[Block], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Into pages outside the pool. Only what is there, whole and verified, is written to."""
        lost = self.cache.load(blocks, [_bytes(page) for page in pages])
        return [reason is None for reason in lost]

    def store(self, blocks: Sequence[Block], host_indices: torch.Tensor | None) -> list[bool]:
        """Out of slots of the pool. False: dropped, for too much waits to be written or no parent
        is kept; what comes after would have no parent either."""
        begin_s, renewal = time.monotonic(), self.cache.renewal
        stored = [False] * len(blocks)
        starts = self._starts(host_indices, len(blocks))
        for at in range(0, len(starts), self._step):
            batch = blocks[at : at + self._step]
            pages = [self.pool.get_data_page(start) for start in starts[at : at + len(batch)]]
            taken = self.write(batch, pages, renewal)
            stored[at : at + len(batch)] = taken
            if not all(taken):
                break
        self._count("backup", sum(stored), begin_s)
        return stored

    def write(
        self, blocks: Sequence[Block], pages: Sequence[torch.Tensor], renewal: str | None = None
    ) -> list[bool]:
        """Out of pages outside the pool; they are free again when it returns."""
        return self.cache.store(blocks, [_bytes(page.contiguous()) for page in pages], renewal)

    def transfers(self) -> list[tuple[str, int, float]]:
        """What was moved since the last call: prefetch or backup, pages and GB/s."""
        with self._lock:
            taken, self._transfers = self._transfers, []
        return taken

    def _starts(self, host_indices: torch.Tensor | None, num_pages: int) -> list[int]:
        """The first slot of each page; none where there are not just enough slots."""
        size = getattr(self.pool, "logical_page_size", self.pool.page_size)
        if host_indices is None or host_indices.numel() != num_pages * size:
            return []
        return [int(slot) for slot in host_indices[::size]]

    def _count(self, what: str, num_pages: int, begin_s: float) -> None:
        if num_pages:
            took_s = max(time.monotonic() - begin_s, 1e-6)
            with self._lock:
                speed = num_pages * self.page_bytes / took_s / 1e9
                self._transfers.append((what, num_pages, speed))


def _bytes(page: torch.Tensor) -> memoryview:
    """A flat page in host memory, as it lies there."""
    lying: np.ndarray = page.view(torch.uint8).numpy()
    return lying.data
