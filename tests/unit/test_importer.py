"""Traces of block ids: what is read of each format, and that no bad file gives a wrong figure."""

import gzip
import io
import json
import re

import pytest

from foreword.sim.importer import NoPrefixes, ReadOptions, read_lengths, read_trace
from foreword.sim.prompt import prompt_chain
from foreword.sim.trace import TraceError
from traces import ROW, SESSION, ids, read, records, shared, stream


def test_mooncake():
    later = {**ROW, "timestamp": 30_000, "input_length": 512, "hash_ids": [46]}
    with read(ROW, later) as trace:
        first, second = trace
        assert trace.format_name == "mooncake"
        assert trace.notes == []
    assert (first.num_tokens, list(first.ids), first.id_tokens) == (1200, [46, 47, 48], 512)
    assert (first.arrival_s, first.num_output_tokens, first.session) == (0.0, 52, "")
    assert (second.num_tokens, list(second.ids)) == (512, [46])
    assert second.arrival_s == pytest.approx(2.518)


def test_mooncake_with_the_fields_that_others_add():
    rows = [
        {**ROW, "session_id": "a", "block_tokens": 400, "tenant": "x", "cached_tokens": 800},
        {
            "session_id": "a",
            "delay": 500,
            "input_length": 800,
            "hash_ids": [46, 47],
            "block_size": 400,
        },
        {"session_id": "a", "delay": 500, "input_length": 400, "hash_ids": [50], "block_size": 400},
    ]
    (first, second, third), notes = records(*rows)
    assert (first.id_tokens, first.tenant, first.num_cached_tokens) == (400, "x", 800)
    assert [record.arrival_s for record in (second, third)] == [0.5, 1.0]
    assert (first.session, second.session, third.session) == ("a", "a", "a")
    assert any(note.startswith("2 arrivals count from the row before") for note in notes)
    assert any(note.startswith("1 rows begin otherwise") for note in notes)


def test_models_share_nothing():
    with read({**ROW, "model": "a"}, {**ROW, "model": "b"}) as trace:
        first, second = (prompt_chain(record, 16).hashes[0] for record in trace)
    assert first != second


def test_bailian_has_seconds_small_blocks_and_chats():
    row = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40}
    row |= {"output_length": 132, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
    next_row = {**row, "chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "turn": 2}
    last_row = {**row, "chat_id": 161, "parent_chat_id": 160, "timestamp": 70.5, "turn": 3}
    with read(row, next_row, last_row) as trace:
        assert trace.format_name == "bailian"
        assert {(record.id_tokens, record.session) for record in trace} == {(16, "159")}
        assert [round(record.arrival_s, 3) for record in trace] == [0.0, 1.386, 9.386]


@pytest.mark.parametrize("absolute", [False, True])
def test_sessions_with_agents(absolute):
    session = json.loads(json.dumps(SESSION))
    if absolute:
        for request in session["requests"][1]["requests"]:
            request["t"] += 50
    found, _ = records(session)
    assert [record.arrival_s for record in found] == pytest.approx([0, 50.5, 70, 110])
    assert [record.session for record in found] == ["s1", "s1/agent_001", "s1", "s1/agent_001"]
    assert {record.tenant for record in found} == {"s1 m"}
    assert [list(record.ids)[:2] for record in found[:2]] == [[1, 2], [9]]
    assert len(found[0].ids) == 3, "the unfilled block has an id that nothing else has"
    assert (found[2].ttft_s, found[0].ttft_s) == (1.5, None)


def test_runs_are_the_same_sessions():
    short = json.loads(json.dumps(SESSION))
    for request in short["requests"]:
        for one in request.get("requests", [request]):
            found = one.pop("hash_ids")
            one["hash_runs"] = [[found[0], len(found)]]
    with read(SESSION) as long, read(short) as trace:
        assert list(trace) == list(long)


def test_sessions_have_ids_of_their_own_and_start_when_the_seed_says():
    other = {**SESSION, "id": "s2"}
    found, notes = records(SESSION, other)
    assert len({prompt_chain(record, 64).hashes[0] for record in found}) == 4
    assert "2 sessions have no clock in common" in notes[0]
    assert 110 < max(record.arrival_s for record in found) < 86_400
    assert records(SESSION, other)[0] == found
    other_seed, _ = records(SESSION, other, seed=1)
    assert [one.arrival_s for one in other_seed] != [one.arrival_s for one in found]
    together, _ = records(SESSION, other, spread_s=0)
    assert max(record.arrival_s for record in together) == pytest.approx(110)
    in_common, _ = records(*({**one, "hash_id_scope": "global"} for one in (SESSION, other)))
    assert len({prompt_chain(record, 64).hashes[0] for record in in_common}) == 2


def test_ids_of_any_kind_are_told_apart():
    odd = [2**32 - 1, -1, "46", 2**63, 46, 2**31]
    with read({**ROW, "input_length": 3000, "hash_ids": odd}, ROW) as trace:
        first, second = ids(trace)
    assert len(set(first)) == 6
    assert max(first) < 2**32 - 1
    assert first[4] == second[0] == 46


def test_large_blocks_are_those_of_the_small_ones():
    """Their unlimited hits are those of the full large blocks, whatever the ids are named."""
    rows = [
        {**ROW, "input_length": 3072, "hash_ids": [7, 7, 7, 7, 5, 6]},
        {**ROW, "input_length": 3000, "hash_ids": [7, 7, 7, 7, 5, 6]},
        {**ROW, "input_length": 2048, "hash_ids": [7, 7, 7, 8]},
        {**ROW, "input_length": 2048, "hash_ids": [7, 7, 7, 7]},
        {**ROW, "input_length": 700, "hash_ids": [7, 7]},
    ]
    with read(*rows, coarsen=1024) as trace:
        found = ids(trace)
        assert [record.id_tokens for record in trace] == [1024] * 5
    assert found[0][:2] == found[1][:2] == found[3]
    assert (len(found[0]), len(found[1]), len(found[2])) == (3, 3, 2)
    assert found[0][2] != found[1][2]
    assert found[2][0] == found[0][0]
    assert found[2][1] not in found[0] + found[1]
    assert found[4][0] not in found[0]
    mixed = {**rows[0], "block_size": 256, "hash_ids": [7] * 12}
    with pytest.raises(TraceError, match="256 tokens here and for 512 before"):
        read(*rows, mixed, coarsen=1024)
    with pytest.raises(TraceError, match="700 tokens are no multiple of this trace's 512"):
        read(*rows, coarsen=700)


BAD = [
    ({**ROW, "hash_ids": [1, 2, 3, 4]}, "4 ids for 1200 tokens; blocks of 512 would be 3"),
    ({**ROW, "hash_ids": [1]}, "1 ids for 1200 tokens"),
    ({**ROW, "hash_ids": []}, "0 ids for 1200 tokens"),
    ({**ROW, "hash_ids": "abc"}, "a list of ids is expected, not str"),
    ({**ROW, "hash_ids": [1, 2.0, 3]}, "whole number or a string, not float"),
    ({**ROW, "hash_ids": [1, True, 3]}, "whole number or a string, not bool"),
    ({**ROW, "hash_ids": [1, [2], 3]}, "whole number or a string, not list"),
    ({**ROW, "input_length": -5}, "input_length is -5, not a whole number from 0"),
    ({**ROW, "input_length": "1200"}, "input_length is '1200', not a whole number"),
    ({**ROW, "input_length": 1200.0}, "input_length is 1200.0, not a whole number"),
    ({**ROW, "input_length": True}, "input_length is True, not a whole number"),
    ({**ROW, "input_length": 0, "hash_ids": []}, "its prompt is empty"),
    ({**ROW, "input_length": None}, "there is no input_length"),
    ({**ROW, "output_length": -1}, "output_length is -1"),
    ({**ROW, "timestamp": "now"}, "timestamp is 'now', not a number"),
    ({**ROW, "timestamp": [1]}, "not a number"),
    ({**ROW, "block_size": 0}, "blocks have a size of 0"),
    ({**ROW, "block_size": 16}, "3 ids for 1200 tokens; blocks of 16 would be 75"),
    ({**ROW, "block_size": 600, "hash_ids": [1, 2]}, "600 tokens here and for 512 before"),
    ({**ROW, "session_id": ["a"]}, "not a string"),
    ({key: ROW[key] for key in ROW if key != "hash_ids"}, "lengths and no ids"),
    (SESSION, "no input_length; it looks like kv-cache-tester, in a file of mooncake"),
    ({"input": "hello"}, "there is no input_length"),
    (json.dumps(ROW)[:-5], "no JSON"),
    (json.dumps(ROW).replace("1200", "NaN"), "NaN is no number"),
    (json.dumps(ROW)[:-1] + ', "timestamp": 1}', "'timestamp' is there twice"),
    ("[1, 2]", "a JSON object is expected"),
    ("timestamp,input_length", "no JSON"),
]


@pytest.mark.parametrize(("line", "what"), BAD)
def test_a_bad_line_is_named_and_may_be_skipped(line, what):
    lines = [ROW, "", line, ROW]
    with pytest.raises(TraceError) as caught:
        read(*lines)
    assert str(caught.value).startswith("standard input, line 3: ")
    assert what in str(caught.value)
    with read(*lines, on_bad="skip") as trace:
        assert len(trace) == 2
        assert trace.notes == [f"1 lines skipped: {caught.value}"]


BAD_SESSIONS = [
    ({"id": ""}, "the session has no id"),
    ({"id": "s1"}, "there is a session 's1' already"),
    ({"hash_id_scope": "world"}, "hash_id_scope is 'world'"),
    ({"requests": []}, "the session has no requests"),
    ({"requests": [7]}, "not a list of objects"),
    ({"requests": [{"t": -1, "in": 64, "hash_ids": [1]}]}, "a request has no t from 0"),
    ({"requests": [{"in": 64, "hash_ids": [1]}]}, "a request has no t from 0"),
    ({"requests": [{"t": 0, "in": 64}]}, "a list of ids is expected, not NoneType"),
    ({"requests": [{"t": 0, "in": 64, "hash_ids": [1], "ttft": -1}]}, "ttft is -1"),
    ({"requests": [{"t": 0, "in": 64, "hash_runs": [[1, 10**12]]}]}, "runs of 1000000000000 ids"),
    ({"requests": [{"t": 0, "in": 64, "hash_runs": [[1]]}]}, "a run is the first id"),
    ({"requests": [{"t": 0, "in": 64, "hash_runs": [[1, 0]]}]}, "a run is the first id"),
    ({"requests": [{"t": 0, "in": 64, "hash_runs": [[1, True]]}]}, "a run is the first id"),
    ({"requests": [{"t": 0, "in": 64, "hash_runs": 7}]}, "a list of runs is expected"),
    ({"requests": [{"t": 0, "in": 640, "hash_runs": [[1, 3]]}]}, "3 ids for 640 tokens"),
]


@pytest.mark.parametrize(("change", "what"), BAD_SESSIONS)
def test_a_bad_session_is_left_out_whole(change, what):
    lines = [SESSION, {**SESSION, "id": "s2", **change}, {**SESSION, "id": "s3"}]
    with pytest.raises(TraceError, match=f"line 2: .*{re.escape(what)}"):
        read(*lines)
    with read(*lines, on_bad="skip") as trace:
        assert len(trace) == 8
        assert {record.tenant for record in trace} == {"s1 m", "s3 m"}


def test_many_bad_lines_are_counted_and_the_first_are_told():
    with read(ROW, *["{"] * 5, on_bad="skip") as trace:
        assert trace.notes[0].startswith("5 lines skipped: standard input, line 2: ")
        assert "line 4" in trace.notes[0]
        assert trace.notes[0].endswith(", and more")


def test_a_file_that_is_cut_off():
    lines = "".join(json.dumps({**ROW, "timestamp": i}) + "\n" for i in range(500)).encode()
    plain = io.BytesIO(lines[:-30])
    with pytest.raises(TraceError, match="line 500: no JSON"):
        read_trace(plain)
    with pytest.raises(TraceError, match=r"line \d+: the file is cut off"):
        read_trace(io.BytesIO(gzip.compress(lines)[:-20]))
    cut = gzip.compress(lines)[:-20]
    with read_trace(io.BytesIO(cut), ReadOptions(on_bad="skip")) as trace:
        assert 0 < len(trace) < 500 or "cut off" in trace.notes[0]


def test_what_is_no_trace():
    for lines, what in (
        ([], "there is no request in it"),
        (["", " "], "there is no request in it"),
        ([{"hello": 1}], "line 1: no known format has such a record"),
        (["hello", "world"], "line 1: it is neither JSON nor of a known log: 'hello'"),
        (["PAR1\x00\x01"], "line 1: it is neither JSON"),
        (["hello", ROW], "line 1: it is neither JSON"),
    ):
        with pytest.raises(TraceError, match=what):
            read(*lines)
    with pytest.raises(TraceError, match="no request"):
        read("{", on_bad="skip")
    with read("hello", "world", ROW, on_bad="skip") as trace:
        assert trace.notes[0].startswith("2 lines skipped: standard input, line 1: it is neither")
    with pytest.raises(TraceError, match="no format 'parquet'; there are "):
        read(ROW, format_name="parquet")
    for wrong in ({"on_bad": "ignore"}, {"coarsen": 0}, {"block_size": -1}, {"spread_s": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ReadOptions(**wrong)


def test_times_that_go_back_are_put_in_order_and_told():
    with read(ROW, {**ROW, "timestamp": 0}, {**ROW, "timestamp": 27_482}) as trace:
        assert [record.arrival_s for record in trace] == [0.0, 27.482, 27.482]
        assert trace.notes == ["1 requests stand after later ones; they are put in order"]


def test_lengths_alone_give_arrivals_and_no_hit_rate():
    lengths = {key: ROW[key] for key in ROW if key != "hash_ids"}
    with pytest.raises(NoPrefixes, match="line 1: this trace has lengths"):
        read({**lengths, "timestamp": 2000}, lengths)
    with read(lengths, ROW, on_bad="skip") as trace:
        assert trace.notes[0].startswith("1 lines skipped: standard input, line 1: it has lengths")
    with pytest.raises(NoPrefixes, match="line 1: this trace has lengths"):
        read(lengths, lengths, on_bad="skip")
    found = read_lengths(stream(lengths, {**ROW, "timestamp": 2000}))
    assert [(one.num_tokens, one.arrival_s, one.num_output_tokens) for one in found] == [
        (1200, 2.0, 52),
        (1200, 27.482, 52),
    ]


def test_files_and_folders(tmp_path):
    for name, session in (("b.json", "s1"), ("a.json", "s2")):
        (tmp_path / name).write_text(json.dumps({**SESSION, "id": session}, indent=1))
    (tmp_path / ".hidden").write_text("hello")
    with read_trace(tmp_path) as trace:
        assert len(trace) == 8
    (tmp_path / "c.json").write_text(json.dumps({**SESSION, "id": "s1"}))
    with pytest.raises(TraceError, match=r"c\.json, line 1: there is a session 's1' already"):
        read_trace(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "d.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="there is no file in it"):
        read_trace(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "num_requests", "num_ids", "num_unique"),
    [
        ("mooncake_fast25_conversation.jsonl.gz", 12_031, 288_500, 182_790),
        ("mooncake_fast25_synthetic.jsonl.gz", 3_993, 121_877, 43_924),
    ],
)
def test_public_mooncake_traces(name, num_requests, num_ids, num_unique):
    with read_trace(shared(name)) as trace:
        found = ids(trace)
    assert (len(found), sum(map(len, found))) == (num_requests, num_ids)
    assert len({one for prompt in found for one in prompt}) == num_unique


def test_public_sessions():
    path = shared("claude_code_sessions.rle.jsonl.gz")
    with read_trace(path, ReadOptions(coarsen=512)) as trace:
        assert len(trace) == 22_892
        assert len({record.session.split("/")[0] for record in trace}) == 346
        assert sum(len(record.ids) for record in trace) == sum(
            -(-record.num_tokens // 512) for record in trace
        )
