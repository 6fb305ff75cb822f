"""Logs of vLLM and SGLang: the prompts' token ids, among all else that a server writes."""

import json

import pytest

from foreword.sim.importer import ReadOptions, read_trace
from foreword.sim.trace import TraceError
from traces import FINISH, OLD_VLLM, VLLM, read, records, stream


def test_vllm():
    with read(*VLLM) as trace:
        one, two = trace
        assert trace.format_name == "vllm-log"
        assert trace.notes == []
    assert [list(record.ids) for record in (one, two)] == [[1, 2, 3], [1, 2, 4, 5]]
    assert [list(record.output_ids) for record in (one, two)] == [[], [6, 7]]
    assert two.arrival_s == pytest.approx(1e-6, rel=0.5), "after the other of its second"
    assert (one.tenant, two.tenant) == ("", "sql")
    (old,), _ = records(*VLLM[:2], OLD_VLLM)
    assert list(old.ids) == [1, 2]


def test_vllms_log_over_new_year():
    late = OLD_VLLM.replace("11-30", "12-31").replace("cmpl-9", "cmpl-8")
    (one, two), _ = records(late, OLD_VLLM.replace("11-30", "01-01"))
    assert two.arrival_s - one.arrival_s == pytest.approx(86_400)


def test_vllm_logs_without_prompts_say_what_to_change():
    with pytest.raises(TraceError, match="VLLM_LOGGING_LEVEL=DEBUG"):
        read(VLLM[0], VLLM[3])
    embedded = VLLM[2].replace("[1, 2, 3]", "None")
    with pytest.raises(TraceError, match="line 1: it has no token ids"):
        read(embedded)
    with pytest.raises(TraceError, match="line 2: there is a request cmpl-1 already"):
        read(VLLM[2], VLLM[2])
    with pytest.raises(TraceError, match="line 1: its time cannot be"):
        read(VLLM[2].replace("11-30", "13-30"))
    same = VLLM[2].replace("cmpl-1", "cmpl-3")
    _, notes = records(VLLM[2], same)
    assert notes[0].startswith("2 prompts have the greatest length, 3: if --max-log-len")


def test_sglang():
    lines = ["INFO: started", FINISH, "[2025-05-27 20:00:15] Decode batch, #running-req: 4"]
    later = FINISH.replace("20:00:14", "20:00:16").replace("lora_path=None", "lora_path='l'")
    with read(*lines, later) as trace:
        one, two = trace
        assert trace.format_name == "sglang-log"
    assert (list(one.ids), list(one.output_ids)) == ([5, 6, 7], [8, 9])
    assert (one.num_cached_tokens, two.arrival_s, two.tenant) == (1, 2.0, "l")
    for change, what in (
        (("[5, 6, 7]", "[5] ... [7]"), "the middle of its token ids is cut out"),
        (("input_ids=[5, 6, 7], ", ""), "it has no input_ids: log at level 3"),
        (("'prompt_tokens': 3", "'prompt_tokens': 4"), "3 token ids, and it counts 4"),
        (("'cached_tokens': 1", "'cached_tokens': 4"), "4 cached tokens of a prompt of 3"),
        (("[2025-05-27 20:00:14 TP0] ", ""), "the line has no time"),
    ):
        with pytest.raises(TraceError, match=f"line 4: {what}"):
            read(*lines, FINISH.replace(*change))


def test_sglang_as_json():
    event = {
        "timestamp": "2025-05-27T20:00:14.250000",
        "event": "request.finished",
        "rid": "r1",
        "obj": {"rid": "r1", "text": None, "input_ids": [5, 6, 7], "lora_path": None},
        "out": {
            "text": "a",
            "output_ids": [8, 9],
            "meta_info": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}
            | {"e2e_latency": 1.25},
        },
    }
    received = {"timestamp": "x", "event": "request.received", "rid": "r1", "obj": {"rid": "r1"}}
    lines = ["INFO: started", received, event, {"level": "info"}]
    (one,), _ = records(*lines)
    assert (list(one.ids), list(one.output_ids), one.num_cached_tokens) == ([5, 6, 7], [8, 9], 1)
    cut = json.loads(json.dumps(event))
    cut["obj"]["input_ids"] = [5, "...", 7]
    with pytest.raises(TraceError, match="line 5: the middle of its token ids is cut out"):
        read(*lines, cut)
    with read_trace(stream(*lines, cut), ReadOptions(on_bad="skip")) as trace:
        assert len(trace) == 1
        assert trace.notes[0].startswith("1 lines skipped")
    cut = json.loads(json.dumps(event))
    cut["out"]["output_ids"] = [8, "...", 9]
    (one,), _ = records(cut)
    assert (len(one.output_ids), one.num_output_tokens) == (0, 2)
