"""Traces with something wrong in them: an error of the right line, or what the other lines say."""

import copy
import io
import json
import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreword.sim.importer import ReadOptions, read_trace
from foreword.sim.trace import TraceError
from traces import (
    ATTRIBUTES,
    FINISH,
    PAYLOAD,
    ROUND,
    ROW,
    SESSION,
    SPAN,
    VLLM,
)

CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
BODY = {
    "request": {
        "model": "m",
        "system": "Be short.",
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "messages": [*CHAT["messages"], {"role": "assistant", "content": [USE]}],
        "metadata": {"user_id": "u"},
    },
    "response": {"content": [USE], "usage": {"input_tokens": 5, "cache_read_input_tokens": 3}},
    "timestamp": 1760428436.5,
}
ITEMS = {
    "model": "m",
    "input": [
        {"role": "user", "content": "Hello"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ],
    "created_at": "2026-01-02T03:04:05Z",
}
BAILIAN = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 40, "turn": 1}
OTLP_SPAN = {
    "traceId": "5b",
    "startTimeUnixNano": "1767323045500000000",
    "attributes": [
        {"key": key, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": 9}}
        for key, value in ATTRIBUTES.items()
    ],
    "events": [{"name": "gen_ai.client.inference.operation.details", "attributes": []}],
}
EVENT = {
    "timestamp": "2025-05-27T20:00:14.25",
    "event": "request.finished",
    "obj": {"input_ids": [5, 6, 7]},
    "out": {"output_ids": [8], "meta_info": {"prompt_tokens": 3, "e2e_latency": 1.5}},
}
RECORDS = [
    ROW,
    {**ROW, "session_id": "s", "delay": 5, "block_size": 512, "cached_tokens": 7, "model": "m"},
    {**BAILIAN, "hash_ids": [1, 2, 3], "output_length": 3, "type": "text"},
    SESSION,
    {**SESSION, "requests": [{"t": 1.5, "in": 640, "out": 3, "hash_runs": [[1, 4], [9, 6]]}]},
    ROUND,
    PAYLOAD,
    SPAN,
    {"resourceSpans": [{"scopeSpans": [{"spans": [OTLP_SPAN]}]}]},
    BODY,
    ITEMS,
    {"model": "m", "prompt": ["Once", "upon"]},
    {**CHAT, "output_length": 5, "session_id": "s", "delay": 3},
    {"id": "a", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    {"timestamp": 1760428436442742, "input": "abcd", "output": "12345", "session_id": "s"},
    {"prompt_token_ids": [1, 2], "output_token_ids": [3], "arrival_s": 1, "ttft_ms": 5},
    EVENT,
]
LOGS = [VLLM, ["INFO: started", FINISH, FINISH]]
TABLE = ["created_at,request_json", f'1,"{json.dumps(CHAT).replace(chr(34), chr(34) * 2)}"', "2,x"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "...", "abc", "-1", "1e400", "[", "\ud800", "2026-01-01", "local"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def places(value, path=()):
    """Where something can be changed in a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(one, (*path, key))
    return found


def changed(draw, record):
    """A record with something of it gone, or something else in its place."""
    record = copy.deepcopy(record)
    for _ in range(draw(st.integers(1, 2))):
        known = places(record)
        if not known:
            break
        *way, last = draw(st.sampled_from(known))
        place = record
        for key in way:
            place = place[key]
        if draw(st.booleans()):
            place[last] = draw(JSON)
        else:
            del place[last]
    return record


def read(raw, on_bad):
    """The records of a file, or the number of the line that is wrong; 0 where there is none."""
    try:
        with read_trace(io.BytesIO(raw), ReadOptions(on_bad=on_bad)) as trace:
            return list(trace)
    except TraceError as error:
        found = re.match(r"standard input(?:, line (\d+))?: (.+)", str(error))
        if not found[1]:
            assert found[2] == "there is no request in it"
        return int(found[1] or 0)


def full_blocks(record):
    """What of a record does not depend on other lines. Ids that are made do."""
    kept = 0 if record.session.startswith("claude:") else record.num_tokens // record.id_tokens
    return (record.num_tokens, record.id_tokens, tuple(record.ids[:kept]))


COMMON = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: ",".join(record)[:40])
@COMMON
@given(draw=st.data())
def test_a_record_with_anything_in_it(record, draw):
    """Whatever is in it: it is refused by its line, or the others are read as without it."""
    last = {**record, "id": "last"} if "requests" in record else record
    lines = [record, changed(draw.draw, record), last]
    raw = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    alone = f"{json.dumps(record)}\n\n{json.dumps(last)}\n".encode()
    wanted = Counter(map(full_blocks, read(alone, "error")))
    strict, lenient = read(raw, "error"), read(raw, "skip")
    assert Counter(map(full_blocks, lenient)) >= wanted
    if isinstance(strict, list):
        assert strict == lenient
    else:
        assert strict == 2


@COMMON
@given(draw=st.data())
@pytest.mark.parametrize("lines", [*([r, r] for r in RECORDS if "id" not in r), *LOGS, TABLE])
def test_bytes_that_are_wrong(lines, draw):
    """Bytes gone, doubled or changed: an error of some line, or a trace; never another error."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    raw = bytearray("\n".join(texts).encode())
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(raw)))
        kind = draw.draw(st.sampled_from(["cut", "gone", "twice", "other"]))
        size = draw.draw(st.integers(1, 20))
        if kind == "cut":
            del raw[at:]
        elif kind == "gone":
            del raw[at : at + size]
        elif kind == "twice":
            raw[at:at] = raw[at : at + size]
        else:
            raw[at : at + 1] = draw.draw(st.binary(max_size=3))
    strict, lenient = read(bytes(raw), "error"), read(bytes(raw), "skip")
    if isinstance(strict, list):
        assert lenient == strict
    else:
        assert 0 <= strict <= bytes(raw).count(b"\n") + 1
        assert isinstance(lenient, list) or lenient == 0 or b"_tokens" in raw or b"_length" in raw


@COMMON
@given(draw=st.data())
def test_a_json_array_with_wrong_bytes(draw):
    chat = {"conversations": [{"from": "human", "value": 'a "b" {[\\'}]}
    raw = bytearray(json.dumps([chat] * 4, indent=draw.draw(st.sampled_from([None, 1]))).encode())
    at = draw.draw(st.integers(0, len(raw)))
    raw[at : at + draw.draw(st.integers(0, 5))] = draw.draw(st.binary(max_size=2))
    found = read(bytes(raw), "error")
    if isinstance(found, list):
        assert len(found) <= 4
    else:
        assert 0 <= found <= bytes(raw).count(b"\n") + 1
