"""The request log: written whole or not at all, and read as a trace and as the engine behind it."""

import asyncio
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from foreword.cli import main as cli
from foreword.core.block import BlockHash, Chain
from foreword.core.cost import StepCost, StepFit, StepWork
from foreword.core.request import Request, SamplingParams
from foreword.core.stats import TierStats
from foreword.engine import request_log as request_log_module
from foreword.engine.request_log import RequestLog
from foreword.engine.sample import Sample
from foreword.engine.stream import Stream
from foreword.sim.formats.request_log import read_engine
from foreword.sim.importer import read_trace
from foreword.sim.trace import TraceError

FACTS = {
    "model": "m",
    "block_size": 16,
    "block_bytes": 1 << 15,
    "blocks": 24,
    "tiers": [{"name": "disk", "blocks": 100, "found": 0}],
    "max_num_seqs": 8,
    "max_batch_tokens": 64,
    "max_prefill_tokens": 96,
    "reuse": True,
}
LINE = {
    "arrival": 100.0,
    "tenant": "",
    "n": 1,
    "ttft": 0.5,
    "total": 0.75,
    "rest": 0.01,
    "finish": ["stop"],
    "prompt_ids": [1, 2, 3],
    "answer_ids": [[4, 5]],
    "cached": 2,
    "restored": {"0": 1},
}


def ended(prompt: list[int], *answers: list[int], salt: str = "") -> Stream:
    """A request that is done."""

    async def made() -> Stream:
        request = Request("r", tuple(prompt), SamplingParams(9), len(answers), salt)
        return Stream(request, len(answers))

    stream = asyncio.run(made())
    for index, answer in enumerate(answers):
        chain = Chain(BlockHash(bytes(32)), 16, prompt)
        sample = Sample(stream.request, index, chain, 0, None)  # type: ignore[arg-type]
        chain.extend(answer)
        sample.num_cached_tokens, sample.restored = 2, {0: 1}
        sample.finish_reason = "stop"
        stream.samples.append(sample)
        stream.end(sample)
    stream.first_token_s = stream.submitted_s + 0.25
    return stream


def learnt() -> tuple[StepFit, list[TierStats]]:
    fit = StepFit()
    fit.add(StepWork(10, 55), 0.5)
    return fit, [TierStats("disk", num_loaded_blocks=4, busy_s=0.02)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(log: RequestLog, *streams: Stream) -> None:
    log.begin(FACTS, learnt)
    for stream in streams:
        log.add(stream, 0.01)
    log.close()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    before_s = time.time()
    written(RequestLog(path), ended([1, 2, 3], [4, 5], salt="s3cret"), ended([7, 7], [8], [9, 9]))
    assert path.stat().st_mode & 0o777 == 0o600
    assert "s3cret" not in path.read_text()
    engine = read_engine(path)
    assert engine is not None
    assert (engine.model, engine.num_cost_steps) == ("m", 1)
    shape = engine.shape
    assert (shape.num_blocks, shape.block_size, shape.max_num_seqs) == (24, 16, 8)
    assert (shape.max_batch_tokens, shape.max_prefill_tokens, shape.reuse) == (64, 96, True)
    assert shape.cost.prefill_s(10) == pytest.approx(0.5)
    (room,) = shape.tiers
    assert (room.name, room.num_blocks) == ("disk", 100)
    assert room.cost.load_s(1 << 15) == pytest.approx(0.005)
    assert before_s - 1 < lines(path)[1]["arrival"] < time.time() + 1
    with read_trace(path) as trace:
        first, second = trace
        assert trace.format_name == "foreword"
    assert (list(first.ids), list(first.output_ids), first.num_output_tokens) == (
        ([1, 2, 3], [4, 5], 2)
    )
    assert (first.num_cached_tokens, first.ttft_s) == (2, pytest.approx(0.25))
    assert first.tenant
    assert second.tenant == ""
    assert (list(second.output_ids), second.sample_lengths) == ([8, 9, 9], (1, 2))


def test_one_salt_has_one_digest_which_other_runs_do_not_have(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        path = tmp_path / name
        written(RequestLog(path), *(ended([1], [2], salt=salt) for salt in ("x", "y", "x")))
        found += [line["tenant"] for line in lines(path) if "tenant" in line]
    assert found[0] == found[2] != found[1]
    assert found[3] == found[5] != found[4]
    assert len(set(found)) == 4


def test_who_leaves_before_the_first_token_is_told_of_too(tmp_path: Path) -> None:
    stream = ended([1, 2, 3], [])
    stream.first_token_s, stream.num_computed_tokens = None, 2
    path = tmp_path / "log.jsonl"
    written(RequestLog(path), stream)
    with read_trace(path) as trace:
        (record,) = trace
    assert (record.cancelled_at, record.ttft_s, record.num_cached_tokens) == (2, None, None)


def test_a_full_disk_costs_lines_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first writes fail, and one in the middle of a line; nothing is there in part."""
    path, write, calls = tmp_path / "log.jsonl", os.write, [0]

    def failing(file: int, content: memoryview) -> int:
        calls[0] += 1
        if calls[0] in (1, 2, 5):
            raise OSError(28, "No space left on device")
        return write(file, content[:9] if calls[0] == 4 else content)

    monkeypatch.setattr(request_log_module.os, "write", failing)
    monkeypatch.setattr(RequestLog, "_add_costs", lambda _log: None)
    log = RequestLog(path)
    with caplog.at_level(logging.WARNING):
        written(log, *(ended([at], [2]) for at in range(5)))
    assert log.num_dropped == 2
    assert [line.get("prompt_ids") for line in lines(path)] == [None, [1], [3], [4]]
    assert sum("No space left" in record.message for record in caplog.records) == 1


def test_what_waits_to_be_written_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log_module, "_WAITING_TOKENS_MAX", 10)
    log = RequestLog(tmp_path / "log.jsonl")
    written(log, ended(list(range(9)), [2, 3]), ended([1], [2]))
    assert log.num_dropped == 1


def test_where_nothing_can_be_written_every_request_counts() -> None:
    log = RequestLog(Path("/dev/full"))
    written(log, ended([1], [2]), ended([3], [4]))
    assert log.num_dropped == 2


def test_a_server_says_at_once_that_its_log_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--port", "0", "--request-log", str(tmp_path / "no" / "log.jsonl")]
    assert cli.main(words) != 0
    assert "--request-log" in capsys.readouterr().err


def test_restarts_and_clearings_part_what_is_before_from_what_is_after(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    found = {**FACTS, "tiers": [{"name": "disk", "blocks": 100, "found": 7}]}
    rows = [
        {"foreword": "1", "started": 1.0, **FACTS},
        {**LINE, "arrival": 100.0},
        {"costs": {"steps": 3, "per_token_s": 1.0, "read_block_s": [0.0]}},
        {"cleared": 101.0},
        {**LINE, "arrival": 102.0},
        {"foreword": "1", "started": 103.0, **found, "blocks": 48},
        {**LINE, "arrival": 104.0, "tenant": "a"},
    ]
    path.write_text("".join(f"{json.dumps(row, separators=(',', ':'))}\n" for row in rows))
    with read_trace(path) as trace:
        assert [record.tenant for record in trace] == ["", " 1", "a 2"]
        notes = " ".join(trace.notes)
    assert "1 restarts" in notes
    assert "1 runs began with KV on disk" in notes
    engine = read_engine(path)
    assert engine is not None
    assert engine.shape.num_blocks == 48
    assert engine.shape.cost == StepCost(1.0)
    assert engine.shape.tiers[0].cost.load_s(1 << 30) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_ids": []}, "its prompt is empty"),
        ({"prompt_ids": [1, -2]}, "prompt_ids is no list of token ids"),
        ({"prompt_ids": [1, True]}, "prompt_ids is no list of token ids"),
        ({"answer_ids": [4, 5]}, "answer_ids is no list of token ids"),
        ({"answer_ids": None}, "answer_ids is no list"),
        ({"arrival": None}, "arrival is None, not a number from 0"),
        ({"total": -1}, "total is -1, not a number from 0"),
        ({"ttft": "soon"}, "ttft is 'soon', not a number"),
        ({"cached": -1}, "cached is -1, not a whole number from 0"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "log.jsonl"
    rows = [{"foreword": "1", "started": 1.0, **FACTS}, {**LINE, **change}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(TraceError, match=f"log.jsonl, line 2: {said}"):
        read_trace(path)


def test_an_engine_is_read_of_logs_alone_that_say_enough(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('{"timestamp": 1}\n')
    assert read_engine(path) is None
    path.write_text("")
    assert read_engine(path) is None
    head = {"foreword": "1", "started": 1.0, **FACTS}
    for change, said in (
        ({"blocks": None}, "there is no blocks"),
        ({"blocks": 0}, "its engine has no room"),
        ({"tiers": 3}, "tiers is 3"),
    ):
        path.write_text(json.dumps({**head, **change}, separators=(",", ":")) + "\n")
        with pytest.raises(TraceError, match=said):
            read_engine(path)


def test_a_run_begins_on_a_line_of_its_own(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"foreword": "0", "started": 1}\n{"arrival": 2, "pro')
    log = RequestLog(path)
    log.begin({"blocks": 4}, lambda: (StepFit(), ()))
    log.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"arrival": 2, "pro'
    assert json.loads(lines[2])["blocks"] == 4
