"""KV events on the wire: both encodings on both levels, golden bytes, tolerance, refusals."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from foreword.core.wire import BadBatch, EventBatch, decode_batch, encode_batch, replay_endpoint

A, B = b"\xaa" * 32, b"\xbb" * 32
STORED = BlockStored((A, B), None, (1, 2, 300, 70000), 2)
BATCH = EventBatch(1.5, (STORED, BlockRemoved((B,)), AllBlocksCleared()), 3)
FORMS = [(False, True), (False, False), (True, True), (True, False)]

hashes = st.binary(min_size=1, max_size=40)
media = st.sampled_from(["GPU", "CPU", "DISK"])
groups = st.none() | st.integers(0, 9)
events = st.one_of(
    st.builds(
        BlockStored,
        st.lists(hashes, max_size=4).map(tuple),
        st.none() | hashes,
        st.lists(st.integers(0, 2**32 - 1), max_size=6).map(tuple),
        st.integers(1, 512),
        media,
        groups,
    ),
    st.builds(BlockRemoved, st.lists(hashes, max_size=4).map(tuple), media, groups),
    st.just(AllBlocksCleared()),
)
batches = st.builds(
    EventBatch,
    st.floats(0, 1e10),
    st.lists(events, max_size=5).map(tuple),
    st.none() | st.integers(0, 63),
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary()
    | st.sampled_from(["type", "events", "BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU"]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.sampled_from(
                ["ts", "events", "type", "block_hashes", "token_ids", "block_size", "x"]
            ),
            inner,
            max_size=6,
        )
    ),
)


def packed(batch: EventBatch, form: tuple[bool, bool]) -> bytes:
    return msgspec.msgpack.encode(encode_batch(batch, batch_as_map=form[0], events_as_maps=form[1]))


@given(batches, st.sampled_from(FORMS))
def test_a_round_trip_changes_nothing(batch: EventBatch, form: tuple[bool, bool]) -> None:
    assert decode_batch(msgspec.msgpack.decode(packed(batch, form))) == batch


def test_golden_bytes() -> None:
    """What others read must not change by accident. Written out by hand from the msgpack format."""

    def text(word: str) -> bytes:
        return bytes([0xA0 | len(word)]) + word.encode()

    def block_hash(value: bytes) -> bytes:
        return b"\xc4\x20" + value

    time = b"\xcb\x3f\xf8" + bytes(6)
    tokens = b"\x94\x01\x02\xcd\x01\x2c\xce\x00\x01\x11\x70"
    none = b"\xc0"
    arrays = (
        *(b"\x93" + time + b"\x93",),
        *(b"\x98" + text("BlockStored") + b"\x92" + block_hash(A) + block_hash(B) + none,),
        *(tokens + b"\x02" + none + text("GPU") + none,),
        *(b"\x93" + text("BlockRemoved") + b"\x91" + block_hash(B) + text("GPU"),),
        *(b"\x91" + text("AllBlocksCleared"), b"\x03"),
    )
    assert packed(BATCH, (False, False)) == b"".join(arrays)
    maps = (
        *(b"\x83" + text("ts") + time + text("events") + b"\x93",),
        *(b"\x88" + text("type") + text("BlockStored"),),
        *(text("block_hashes") + b"\x92" + block_hash(A) + block_hash(B),),
        *(text("parent_block_hash") + none + text("token_ids") + tokens,),
        *(text("block_size") + b"\x02" + text("lora_id") + none,),
        *(text("medium") + text("GPU") + text("lora_name") + none,),
        *(b"\x83" + text("type") + text("BlockRemoved"),),
        *(text("block_hashes") + b"\x91" + block_hash(B) + text("medium") + text("GPU"),),
        *(b"\x81" + text("type") + text("AllBlocksCleared"),),
        *(text("data_parallel_rank") + b"\x03",),
    )
    assert packed(BATCH, (True, True)) == b"".join(maps)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, bytes(8)), (2**64 - 1, b"\xff" * 8), (-1, b"\xff" * 8), (-(2**63), b"\x80" + bytes(7))],
)
def test_a_hash_may_be_an_integer(number: int, expected: bytes) -> None:
    for event in (["BlockRemoved", [number]], {"type": "BlockRemoved", "block_hashes": [number]}):
        assert decode_batch([0, [event]]).events == (BlockRemoved((expected,)),)


def test_what_is_newer_is_passed_over() -> None:
    """Unknown fields, unknown kinds (counted), longer arrays, other things in later places."""
    stored = {"type": "BlockStored", "block_hashes": [A], "token_ids": [7], "block_size": 1}
    batch = {"ts": 1, "attn_dp_rank": 2, "mood": "good"}
    batch["events"] = [
        {**stored, "session_id": "s", "extra_keys": [["salt"]], "group_idx": 4, "medium": "CPU"},
        {"type": "BlockLent", "to": "somebody"},
        ["BlockBorrowed"],
        ["BlockStored", [A], B, [7], 1, None, "GPU", None, "salt", "not a group", 9, {}],
        ["BlockStored", [A], None, [], 1],
        ["BlockRemoved", [A], "DISK", 2, "LOCAL", "tier"],
    ]
    assert decode_batch(batch) == EventBatch(
        1.0,
        (
            BlockStored((A,), None, (7,), 1, "CPU", 4),
            BlockStored((A,), B, (7,), 1),
            BlockStored((A,), None, (), 1),
            BlockRemoved((A,), "DISK", 2),
        ),
        rank=2,
        num_unknown=2,
    )


@pytest.mark.parametrize(
    "broken",
    [
        *(None, 7, "text", [], {}, [1.0], ["now", []], [True, []], [1.0, "events"]),
        *([1.0, [7]], [1.0, [[]]], [1.0, [[7]]], [1.0, [{}]], [1.0, [["BlockRemoved"]]]),
        *([1.0, [["BlockRemoved", A]]], [1.0, [["BlockRemoved", [None]]]]),
        *([1.0, [["BlockRemoved", [2**64]]]], [1.0, [["BlockRemoved", [True]]]]),
        *([1.0, [["BlockRemoved", [b""]]]], [1.0, [["BlockRemoved", ["aa"]]]]),
        *([1.0, [["BlockStored", [A], None, ["x"], 1]]], [1.0, [["BlockStored", [A], None, [1]]]]),
        *([1.0, [["BlockStored", [A], 1.5, [1], 1]]], [1.0, [["BlockStored", [A], None, [1], 0]]]),
    ],
)
def test_a_broken_batch_is_refused(broken: Any) -> None:
    with pytest.raises(BadBatch):
        decode_batch(broken)


@given(plain)
def test_nothing_else_is_raised(something: Any) -> None:
    try:
        decode_batch(something)
    except BadBatch:
        return


def test_blocks_whose_tokens_are_not_told_are_known_all_the_same() -> None:
    """As vLLM's connector names chunks in host memory."""
    stored = {"type": "BlockStored", "block_hashes": [A], "token_ids": [], "block_size": 0}
    removed = {"type": "BlockRemoved", "block_hashes": [A]}
    events = decode_batch([1.0, [{**stored, "medium": "CPU"}, removed], 0]).events
    assert events == (BlockStored((A,), None, (), 0, "CPU"), BlockRemoved((A,)))


def test_the_replay_endpoint_is_the_next_port() -> None:
    assert replay_endpoint("tcp://127.0.0.1:5557") == "tcp://127.0.0.1:5558"
    assert replay_endpoint("tcp://[::1]:80") == "tcp://[::1]:81"
    for bad in ("", "5557", "tcp://5557", "ipc://x:1", "tcp://:1", "tcp://h:x", "tcp://h:65535"):
        with pytest.raises(ValueError, match=r"endpoint|port"):
            replay_endpoint(bad)
