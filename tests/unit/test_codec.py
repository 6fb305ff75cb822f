"""Sealed records are a stored format: golden bytes, and whatever is not the record asked for."""

import struct
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.block import BlockHash, token_key
from foreword.store.codec import (
    HEADER_BYTES,
    UNPLACED,
    BadRecord,
    RecordKey,
    check,
    kv_offset,
    record_bytes,
    seal,
)

KEY = RecordKey(
    root=BlockHash(bytes(range(32))),
    parent=BlockHash(bytes(range(32, 64))),
    block_hash=BlockHash(bytes(range(64, 96))),
    position=3,
    token_key=token_key((7, 8, 9, 1 << 20)),
)
KV = bytes(range(48))
GOLDEN = (
    b"FOREWORD"
    + struct.pack("<HHIQ", 1, 0, 3, 64)
    + bytes(range(96))
    + bytes(8)
    + bytes.fromhex("641bbe62ab95737e2ce208e6c516face")
    + bytes(48)
    + bytes.fromhex("00000007 00000008 00000009 00100000")
    + KV
)
FIELDS = {
    "magic": slice(0, 8),
    "version": slice(8, 10),
    "flags": slice(10, 12),
    "position": slice(12, 16),
    "length": slice(16, 24),
    "root": slice(24, 56),
    "parent": slice(56, 88),
    "block hash": slice(88, 120),
    "checksum": slice(128, 144),
    "tokens": slice(192, 208),
    "KV": slice(208, 256),
}


def sealed(key: RecordKey, kv: bytes) -> bytearray:
    record = bytearray(b"\xff" * (HEADER_BYTES + len(key.token_key) + len(kv)))
    record[len(record) - len(kv) :] = kv
    seal(memoryview(record), key)
    return record


def refused(record: bytes, key: RecordKey = KEY) -> str:
    """Why a record is refused."""
    with pytest.raises(BadRecord) as caught:
        check(memoryview(record), key)
    return str(caught.value)


def test_golden_bytes() -> None:
    """A change here orphans every stored record: it needs a decision record."""
    assert sealed(KEY, KV) == GOLDEN
    check(memoryview(GOLDEN), KEY)


def test_sizes() -> None:
    assert (kv_offset(4), record_bytes(4, len(KV))) == (208, len(GOLDEN))
    assert kv_offset(16) == 256


@given(st.binary(max_size=64), st.lists(st.integers(0, (1 << 32) - 1), max_size=4))
def test_what_was_sealed_is_accepted(kv: bytes, tokens: list[int]) -> None:
    key = replace(KEY, token_key=token_key(tokens))
    record = sealed(key, kv)
    check(memoryview(record), key)
    assert record.endswith(token_key(tokens) + kv)


def test_no_flipped_bit_is_accepted() -> None:
    for bit in range(8 * len(GOLDEN)):
        record = bytearray(GOLDEN)
        record[bit // 8] ^= 1 << bit % 8
        assert refused(record)


def test_no_truncated_record_is_accepted() -> None:
    for length in range(len(GOLDEN)):
        assert refused(GOLDEN[:length])


@given(st.binary(min_size=1, max_size=600))
def test_no_longer_record_is_accepted(more: bytes) -> None:
    assert "are here" in refused(GOLDEN + more)


@given(st.sampled_from(sorted(FIELDS)), st.sampled_from(sorted(FIELDS)))
def test_no_swap_of_fields_is_accepted(left: str, right: str) -> None:
    """One field's bytes, cut or repeated to the other's width."""
    record = bytearray(GOLDEN)
    for here, there in ((left, right), (right, left)):
        target, source = FIELDS[here], GOLDEN[FIELDS[there]]
        width = target.stop - target.start
        record[target] = (source * -(-width // len(source)))[:width]
    if record != GOLDEN:
        assert refused(record)


@given(st.data())
def test_no_damage_is_accepted(data: st.DataObject) -> None:
    """Any run of bytes replaced by any other, as long or not."""
    start = data.draw(st.integers(0, len(GOLDEN)))
    stop = data.draw(st.integers(start, len(GOLDEN)))
    record = GOLDEN[:start] + data.draw(st.binary(max_size=80)) + GOLDEN[stop:]
    if record != GOLDEN:
        assert refused(record)


@pytest.mark.parametrize("field", [field.name for field in fields(RecordKey)])
def test_a_whole_record_of_another_block_is_refused(field: str) -> None:
    value = getattr(KEY, field)
    other = replace(KEY, **{field: value + 1 if field == "position" else value[::-1]})
    assert "another" in refused(GOLDEN, other) or "others" in refused(GOLDEN, other)


def test_a_reader_that_does_not_know_the_parent_compares_all_else() -> None:
    unplaced = replace(KEY, parent=KEY.root, position=UNPLACED)
    check(memoryview(GOLDEN), unplaced)
    assert refused(GOLDEN, replace(unplaced, root=KEY.parent)) == "its root is another one"
    assert "block hash" in refused(GOLDEN, replace(unplaced, block_hash=KEY.parent))
    for field in ("position", "parent"):
        record = bytearray(GOLDEN)
        record[FIELDS[field].start] ^= 1
        assert refused(record, unplaced) == "its checksum does not agree"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (0, "it does not start as a record"),
        (8, "its format version is 0, this reads 1"),
        (10, "its flags 0x1 are unknown"),
        (12, "its position is another one"),
        (16, "65 bytes were stored, 64 are here"),
        (24, "its root is another one"),
        (56, "its parent is another one"),
        (88, "its block hash is another one"),
        (120, "its checksum does not agree"),
        (144, "its checksum does not agree"),
        (255, "its checksum does not agree"),
    ],
)
def test_a_refusal_says_what_differs(place: int, reason: str) -> None:
    record = bytearray(GOLDEN)
    record[place] ^= 1
    assert refused(record) == reason
