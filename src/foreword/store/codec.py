"""The sealed record: what one block is below the device, the same bytes in every store.

Format (golden bytes in tests/unit/test_codec.py; all integers little-endian):

    0   8  magic "FOREWORD"
    8   2  format version, 1
   10   2  flags: compression and encryption; 0, there is none yet
   12   4  position: how many blocks come before this one in its chain
   16   8  payload length in bytes
   24  32  root: digest of the Identity and the tenant's salt, where the chain starts
   56  32  parent's block hash; the root for a first block
   88  32  block hash
  120   8  zero
  128  16  checksum: XXH3-128, canonical, of bytes 0 to 128 and then of the payload
  144  48  zero, which sets the payload's KV at byte 256 with blocks of 16 tokens
  192      payload: the token ids, 4 bytes big-endian each, then the KV

The checksum finds damage, not malice: who can write to a store can write what it serves.
"""

import struct
from dataclasses import dataclass

from xxhash import xxh3_128

from foreword.core.block import TOKEN_BYTES, BlockHash

MAGIC = b"FOREWORD"
VERSION = 1
HEADER_BYTES = 192
UNPLACED = -1  # position of a key whose reader does not know it, nor the parent
_HEADER = struct.Struct("<8sHHIQ32s32s32s8x")
_CHECKSUM = slice(_HEADER.size, _HEADER.size + 16)
_PADDING = bytes(HEADER_BYTES - _CHECKSUM.stop)


class BadRecord(ValueError):
    """Bytes that are not the record that was asked for, and why. Never served."""


@dataclass(frozen=True, slots=True)
class RecordKey:
    """Which block of which chain a record is of: all that a reader knows beforehand."""

    root: BlockHash
    parent: BlockHash  # the root for a first block
    block_hash: BlockHash
    position: int  # blocks before it; or UNPLACED
    token_key: bytes  # token ids, 4 bytes big-endian each


def kv_offset(block_size: int) -> int:
    """Where in a record the KV starts."""
    return HEADER_BYTES + block_size * TOKEN_BYTES


def record_bytes(block_size: int, kv_bytes: int) -> int:
    """Length of the record of one block that has `kv_bytes` of KV."""
    return kv_offset(block_size) + kv_bytes


def seal(record: memoryview, key: RecordKey) -> None:
    """Write header and tokens around the KV that is in the record already."""
    kv_start = HEADER_BYTES + len(key.token_key)
    record[HEADER_BYTES:kv_start] = key.token_key
    header = _header(key, len(record) - HEADER_BYTES)
    record[: _HEADER.size] = header
    record[_CHECKSUM] = _checksum(header, record)
    record[_CHECKSUM.stop : HEADER_BYTES] = _PADDING


def check(record: memoryview, key: RecordKey) -> None:
    """Raises BadRecord unless these bytes are the whole and undamaged record of `key`."""
    if len(record) < HEADER_BYTES:
        raise BadRecord(f"it ends after {len(record)} bytes")
    magic, version, flags, position, length, *chain = _HEADER.unpack(record[: _HEADER.size])
    if magic != MAGIC:
        raise BadRecord("it does not start as a record")
    if version != VERSION:
        raise BadRecord(f"its format version is {version}, this reads {VERSION}")
    if flags:
        raise BadRecord(f"its flags {flags:#x} are unknown")
    if length != len(record) - HEADER_BYTES:
        raise BadRecord(f"{length} bytes were stored, {len(record) - HEADER_BYTES} are here")
    names = ("root", "parent", "block hash", "position")
    expected = _expected(key, chain[1], position)
    for name, found, wanted in zip(names, (*chain, position), expected, strict=True):
        if found != wanted:
            raise BadRecord(f"its {name} is another one")
    sum_of_these = _checksum(bytes(record[: _HEADER.size]), record)
    if record[_CHECKSUM.start : HEADER_BYTES] != sum_of_these + _PADDING:
        raise BadRecord("its checksum does not agree")
    if record[HEADER_BYTES : HEADER_BYTES + len(key.token_key)] != key.token_key:
        raise BadRecord("its tokens are others")


def _expected(key: RecordKey, parent: bytes, position: int) -> tuple[bytes, bytes, bytes, int]:
    """Root, parent, block hash and position, in the latter two's place what was stored where the
    reader knows no better: the checksum vouches for that."""
    if key.position != UNPLACED:
        parent, position = key.parent, key.position
    return key.root, parent, key.block_hash, position


def _header(key: RecordKey, length: int) -> bytes:
    return _HEADER.pack(
        MAGIC, VERSION, 0, key.position, length, key.root, key.parent, key.block_hash
    )


def _checksum(header: bytes, record: memoryview) -> bytes:
    digest = xxh3_128(header)
    digest.update(record[HEADER_BYTES:])
    return digest.digest()
