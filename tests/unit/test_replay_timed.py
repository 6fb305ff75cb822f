"""`foreword replay` in virtual time: from a log alone, by another engine, by a data sheet."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foreword.cli import main as cli

COSTS = {"steps": 9, "per_token_s": 0.01, "per_step_s": 0.1, "read_block_s": [0.5]}


def write_log(path: Path, blocks: int = 40, costs: dict[str, Any] | None = None) -> Path:
    """Three requests of 64 tokens, the first two alike, by one client who waits for answers."""
    tiers = [{"name": "disk", "blocks": 100, "shared": False, "found": 0}]
    rows: list[dict[str, Any]] = [
        {
            **{"foreword": "1", "started": 0.0, "model": "tiny", "block_size": 16},
            **{"block_bytes": 1000, "blocks": blocks, "tiers": tiers, "reuse": True},
            **{"max_num_seqs": 8, "max_batch_tokens": 64, "max_prefill_tokens": 256},
        }
    ]
    for at, first in enumerate((1, 1, 2)):
        rows.append(
            {
                **{"arrival": 10.0 + at, "tenant": "", "n": 1, "ttft": 0.5, "total": 0.75},
                **{"rest": 0.0, "finish": ["length"], "prompt_ids": [first] * 64},
                **{"answer_ids": [[5, 6]], "cached": 63 if at == 1 else 0},
            }
        )
    if costs:
        rows.append({"costs": costs})
    path.write_text("".join(f"{json.dumps(row, separators=(',', ':'))}\n" for row in rows))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", costs=COSTS)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * at, "input_length": 1024, "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate(([1, 2], [1, 2], [3, 4], [1, 5]))
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def replayed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    assert cli.main(["replay", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_log_brings_its_engine(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(capsys, log)
    assert (found["model"], found["blocks"], found["block_tokens"]) == ("tiny", 40, 16)
    assert (found["requests"], found["requests_after_answers"]) == (3, 2)
    assert found["hit_tokens_by_tier"] == {"device": 63, "disk": 0}
    assert found["hit_share"] == pytest.approx(63 / 192)
    assert (found["logged"]["hit_tokens"], found["logged"]["ttft_s"]["median"]) == (63, 0.5)
    assert found["ttft_s"]["median"] == pytest.approx(0.1 + 0.64)
    assert found["ttft_s"]["cdf"][0][0] == pytest.approx(0.1 + 0.01)
    assert found["queue_s"]["p99"] == 0
    # Each comes a quarter of a second after the answer before it, which takes two steps.
    assert found["seconds"] == pytest.approx(3 * 0.2 + 2 * 0.64 + 0.01 + 2 * 0.25)
    (worker,) = found["workers"]
    assert (worker["requests"], worker["steps"], worker["decoded_tokens"]) == (3, 6, 3)
    assert worker["tiers"]["disk"]["stored_bytes"] == 8000


def test_people_read_what_was_predicted_beside_what_was_logged(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(log)]) == 0
    printed = capsys.readouterr().out
    assert "reused 32.81% of 192 prompt tokens (63 device, 0 disk)" in printed
    assert "logged 32.81% (63)" in printed
    assert "first token, logged" in printed


def test_flags_change_the_engine(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = replayed(capsys, log, "--blocks", "5", "--routing", "prefix", "--workers", "2")
    assert small["blocks"] == 5
    assert sum(worker["requests"] for worker in small["workers"]) == 3
    assert small["hit_tokens_by_tier"] == {"device": 63}
    tiered = replayed(capsys, log, "--workers", "1", "--blocks", "5+0+9")
    assert tiered["hit_tokens_by_tier"] == {"device": 63, "disk": 0}
    faster = replayed(capsys, log, "--speed-up", "4", "--tier", "host=1GB@1GB/s")
    assert faster["requests_after_answers"] == 0
    assert list(faster["hit_tokens_by_tier"]) == ["device", "host"]
    assert replayed(capsys, log, "--open-loop")["requests_after_answers"] == 0
    assert replayed(capsys, log, "--policy", "leaf-fifo", "--workers", "1")["requests"] == 3


def test_sizes_alone_ask_for_tables(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "rows" in replayed(capsys, log, "--blocks", "40")


def test_any_trace_is_served_by_the_engine_of_a_log(
    trace: Path, log: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of 4,096 blocks of 16 tokens are 128 of the trace's 512."""
    large = write_log(tmp_path / "large.jsonl", 4096, COSTS)
    found = replayed(capsys, trace, "--engine", large)
    assert (found["blocks"], found["block_tokens"]) == (128, 512)
    assert found["hit_tokens"] == 1024 + 512
    assert "answer_s" not in found
    assert any("prefill alone is simulated" in note for note in found["notes"])


def test_a_data_sheet_serves_too(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(capsys, trace, "--model", "llama-3.1-8b", "--hardware", "h100")
    assert found["model"] == "llama-3.1-8b"
    assert 0 < found["ttft_s"]["median"] < 0.1


def test_a_log_without_costs_says_that_time_stands_still(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replayed(capsys, write_log(tmp_path / "log.jsonl"))
    assert found["ttft_s"]["p99"] == 0
    assert found["notes"][0].startswith("the engine has learnt no costs")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "TRACE"], "is no log of foreword serve"),
        (["--engine", "none"], "is no file"),
        (["--model", "llama-3.1-8b"], "--model and --hardware go together"),
        (["--workers", "2", "--compare", "lru@3"], "--compare is not for a replay in virtual time"),
        (["--workers", "2", "--policy", "opt"], "--policy in virtual time is one of"),
        (["--workers", "2", "--blocks", "3,4"], "--blocks in virtual time is one number"),
        (["--workers", "2", "--blocks", "unlimited"], "--blocks in virtual time is one number"),
        (["--workers", "2", "--blocks", "9+9"], "--tier host=SIZE@SPEED"),
        (["--speed-up", "0"], "'0' is no factor above 0"),
        (["--routing", "random"], "invalid choice"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    log: Path, trace: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], said: str
) -> None:
    words = [str(trace) if word == "TRACE" else word for word in words]
    assert cli.main(["replay", str(log), *words]) != 0
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_a_trace_without_an_engine_asks_for_one(
    trace: Path, log: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["replay", str(trace), "--workers", "2"]) != 0
    assert "--engine LOG" in capsys.readouterr().err
    small = write_log(tmp_path / "small.jsonl", 31)
    assert cli.main(["replay", str(trace), "--engine", str(small)]) != 0
    assert "the device holds no block of 512 tokens" in capsys.readouterr().err
