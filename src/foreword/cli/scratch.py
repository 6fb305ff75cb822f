"""Blocks of random bytes to try a store with, and what became of them."""

from collections import Counter
from collections.abc import Iterator
from random import Random

import numpy as np

from foreword.core.block import BlockHash, Chain, token_key
from foreword.store.codec import BadRecord, RecordKey, check, kv_offset, record_bytes, seal
from foreword.store.pages import arena, whole_pages
from foreword.store.store import KVStore

BLOCK_SIZE = 16  # tokens
OUTCOMES = ("recovered", "miss", "refused", "error", "SILENT")  # from best to worst


def pages(num_bytes: int) -> memoryview:
    """Zeros from the start of a page on, in whole pages."""
    return memoryview(arena(whole_pages(num_bytes)))


class Blocks:
    """A chain of blocks under `root`, each with `kv_bytes` of KV: the same for the same root."""

    def __init__(self, root: BlockHash, num_blocks: int, kv_bytes: int) -> None:
        draw = Random(root)
        self.kv_bytes = kv_bytes
        self.record_bytes = record_bytes(BLOCK_SIZE, kv_bytes)
        tokens = [draw.randrange(1 << 17) for _ in range(num_blocks * BLOCK_SIZE)]
        chain = Chain(root, BLOCK_SIZE, tokens)
        self.hashes = chain.hashes
        self.keys = []
        self.records = []
        for i, parent in enumerate([root, *chain.hashes[:-1]]):
            key = RecordKey(
                root=root,
                parent=parent,
                block_hash=chain.hashes[i],
                position=i,
                token_key=token_key(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]),
            )
            record = pages(self.record_bytes)[: self.record_bytes]
            record[kv_offset(BLOCK_SIZE) :] = draw.randbytes(kv_bytes)
            seal(record, key)
            self.keys.append(key)
            self.records.append(record)

    def each(self) -> Iterator[tuple[RecordKey, memoryview]]:
        return zip(self.keys, self.records, strict=True)


class Tally:
    """Outcomes by their number, and how many bytes were accepted that are others."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_silent_bytes = 0

    @property
    def worst(self) -> str:
        return max((name for name, number in self.counts.items() if number), key=OUTCOMES.index)

    def put(self, store: KVStore, blocks: Blocks) -> None:
        """Put each block; what is not taken is counted."""
        for key, record in blocks.each():
            try:
                self.counts["refused"] += not store.put([key], [record])[0]
            except OSError:
                self.counts["error"] += 1

    def read(self, store: KVStore, blocks: Blocks) -> None:
        """Read each block as every reader does."""
        page = pages(blocks.record_bytes)
        for key, record in blocks.each():
            try:
                (length,) = store.get([key.block_hash], [page])
                check(page[:length], key)
            except OSError:
                self.counts["error"] += 1
            except BadRecord:  # nothing at all is one too
                self.counts["miss"] += 1
            else:
                self._compare(page[:length], record)

    def _compare(self, found: memoryview, record: memoryview) -> None:
        if found == record:
            self.counts["recovered"] += 1
            return
        self.counts["SILENT"] += 1
        same = min(len(found), len(record))
        differ = np.frombuffer(found[:same], np.uint8) != np.frombuffer(record[:same], np.uint8)
        self.num_silent_bytes += int(differ.sum()) + len(found) - same
