"""Sealed records for tests and the buffers that stores want, all a function of a few numbers."""

import mmap
from random import Random

from foreword.core.block import BlockHash, Chain, token_key
from foreword.store.codec import RecordKey, kv_offset, record_bytes, seal

BLOCK_SIZE = 4
KV_BYTES = 9000
RECORD_BYTES = record_bytes(BLOCK_SIZE, KV_BYTES)
SLOT_BYTES = 12288  # of whole pages
ROOT = BlockHash(bytes(32))


def buffer(length: int = SLOT_BYTES) -> memoryview:
    """Zeros from the start of a page on."""
    return memoryview(mmap.mmap(-1, SLOT_BYTES))[:length]


def keys_of(num_blocks: int, root: BlockHash = ROOT, seed: int = 0) -> list[RecordKey]:
    """The keys of a chain of random tokens."""
    draw = Random(seed)
    tokens = [draw.randrange(50_000) for _ in range(num_blocks * BLOCK_SIZE)]
    chain = Chain(root, BLOCK_SIZE, tokens)
    parents = [root, *chain.hashes]
    return [
        RecordKey(
            root=root,
            parent=parents[i],
            block_hash=chain.hashes[i],
            position=i,
            token_key=token_key(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]),
        )
        for i in range(num_blocks)
    ]


def sealed(key: RecordKey, seed: int = 0) -> memoryview:
    """The record of a block whose KV is drawn from its hash and `seed`."""
    record = buffer(RECORD_BYTES)
    record[kv_offset(BLOCK_SIZE) :] = Random(key.block_hash + bytes([seed])).randbytes(KV_BYTES)
    seal(record, key)
    return record
