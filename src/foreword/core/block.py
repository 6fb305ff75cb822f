"""Blocks: the unit of KV reuse, and the chained hash that names one.

A block is the KV of `block_size` consecutive tokens. Its hash covers every token before it and the
Identity at the root, so equal hashes mean equal prefixes; a block is never valid on its own.

Hash format (golden values in tests/unit/test_block.py; a change orphans every stored block):
SHA-256 over the parent's 32 bytes, then each token id as 4 bytes big-endian.
Big-endian makes the byte order of token keys equal to their token order, which RadixIndex uses.
"""

import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
BlockId = NewType("BlockId", int)

TOKEN_BYTES = 4


def token_key(token_ids: Iterable[int]) -> bytes:
    """Token ids as 4-byte big-endian words, so that bytes compare as tokens do.

    Raises OverflowError for an id outside 0 to 2**32 - 1.
    """
    words = array("I", token_ids)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


class Chain:
    """The token ids of one sequence, their key, and the hashes of its full blocks so far."""

    __slots__ = ("block_size", "hashes", "key", "root", "token_ids")

    def __init__(self, root: BlockHash, block_size: int, token_ids: Iterable[int] = ()) -> None:
        """`root` is an Identity's root hash; `block_size` is in tokens."""
        assert block_size > 0
        self.root = root
        self.block_size = block_size
        self.token_ids: list[int] = []
        self.key = bytearray()
        self.hashes: list[BlockHash] = []
        self.extend(token_ids)

    def copy(self) -> "Chain":
        """Another chain of the same tokens, without hashing them again."""
        twin = Chain(self.root, self.block_size)
        twin.token_ids, twin.key = self.token_ids.copy(), self.key.copy()
        twin.hashes = self.hashes.copy()
        return twin

    @classmethod
    def of_blocks(cls, root: BlockHash, key: bytes, hashes: list[BlockHash]) -> "Chain":
        """Full blocks whose key and hashes are known."""
        chain = cls(root, len(key) // TOKEN_BYTES // len(hashes))
        words = array("I", key)
        if sys.byteorder == "little":
            words.byteswap()
        chain.token_ids, chain.key, chain.hashes = words.tolist(), bytearray(key), hashes
        return chain

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens and hash each block that they complete."""
        added = list(token_ids)
        self.key += token_key(added)
        self.token_ids += added
        width = self.block_size * TOKEN_BYTES
        parent = self.hashes[-1] if self.hashes else self.root
        key = bytes(self.key[len(self.hashes) * width :])
        for end in range(width, len(key) + 1, width):
            parent = BlockHash(sha256(parent + key[end - width : end]).digest())
            self.hashes.append(parent)
