"""`foreword replay`: its results in each form, and one clear line for what is wrong."""

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foreword.cli import main as cli
from foreword.cli.replay import POLICY_NAMES

PROMPTS = ([1, 2, 3], [4, 5], [1, 2, 3], [6], [1, 2, 9], [4, 5])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Requests of whole blocks of 512 tokens, by two sessions."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate(PROMPTS)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def replayed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    assert cli.main(["replay", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert cli.main(["replay", *map(str, words)]) != 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("foreword replay: ")
    return printed.err


def columns(rows: Sequence[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_rows_are_every_policy_at_every_capacity(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replayed(capsys, trace, "--policy", "lru,opt", "--blocks", "3,unlimited")
    assert columns(result["rows"], "policy", "blocks") == [
        *(("lru", 3), ("lru", "unlimited")),
        *(("opt", 3), ("opt", "unlimited")),
    ]
    shares = columns(result["rows"], "hit_tokens", "hit_blocks", "opt_share")
    assert shares == [
        *((3 / 14, 3 / 14, 3 / 5), (7 / 14, 7 / 14, 1.0)),
        *((5 / 14, 5 / 14, 1.0), (7 / 14, 7 / 14, 1.0)),
    ]
    assert result["rows"][0]["regret"] == pytest.approx(2 / 14)
    assert result["rows"][0]["ceiling_share"] == 3 / 7
    assert result["unlimited"] == {"hit_tokens": 0.5, "hit_blocks": 0.5}
    assert result["trace"]["requests"] == 6
    assert result["trace"]["different_blocks"] == 7


def test_settings_to_compare_have_a_policy_and_tiers_each(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replayed(capsys, trace, "--compare", "lru@3+4+9,fifo@3,lru@3", "--restart-at", "0.5")
    tiered, fifo, plain = result["rows"]
    assert (tiered["blocks"], tiered["host_blocks"], tiered["disk_blocks"]) == (3, 4, 9)
    hits = [tiered[f"{name}_hit_tokens"] for name in ("device", "host", "disk")]
    assert hits == [1 / 14, 1 / 14, 5 / 14]
    assert (tiered["host_loaded_blocks"], tiered["disk_loaded_blocks"]) == (1, 5)
    assert "host_blocks" not in plain
    assert fifo["policy"] == "fifo"


def test_sizes_in_bytes_become_blocks_and_moves_become_bytes(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "4KiB", "--host", "9000", "--bytes-per-token", "2"]
    (row,) = replayed(capsys, trace, *words)["rows"]
    assert (row["blocks"], row["host_blocks"]) == (4, 8)
    assert "disk_blocks" not in row
    assert row["host_stored_bytes"] == row["host_stored_blocks"] * 1024 > 0
    assert row["host_loaded_bytes"] == row["host_loaded_blocks"] * 1024 > 0


def test_without_sizes_it_is_a_curve_that_ends_with_no_limit(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = replayed(capsys, trace)["rows"]
    assert columns(rows, "policy", "blocks") == [("gittins", 3), ("gittins", "unlimited")]


def test_the_page_says_what_was_left_out(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(trace), "--blocks", "2,3", "--warmup", "0.2"]) == 0
    page = capsys.readouterr().out
    assert "5 requests, 5,632 prompt tokens in 11 blocks of 512" in page
    assert "unfinished last blocks" in page
    assert "the KV of answers" in page
    assert "the first 1 requests" in page
    assert (
        "2 requests are longer than the 2 blocks of gittins: counted, with nothing reused." in page
    )
    header = next(line for line in page.splitlines() if line.startswith("policy"))
    assert "refused" in header
    assert "host" not in header


def test_sessions_stand_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens.jsonl"
    lines = [
        {"token_ids": list(range(32)), "session_id": "one"},
        {"token_ids": list(range(48)), "session_id": "two"},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert cli.main(["replay", str(path), "--per", "session", "--blocks", "9"]) == 0
    page = capsys.readouterr().out
    assert page.index("two") < page.index("one")
    assert "66.67" in page


def test_csv_and_plots_have_the_same_rows(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    for name in ("rates.svg", "rates.png"):
        found = tmp_path / "rows.csv", tmp_path / name
        words = ["--policy", "lru,fifo", "--blocks", "3,4", "--csv", found[0], "--plot", found[1]]
        result = replayed(capsys, trace, *words)
        with found[0].open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert columns(rows, "policy", "blocks") == [
            (row["policy"], str(row["blocks"])) for row in result["rows"]
        ]
        assert float(rows[0]["hit_tokens"]) == result["rows"][0]["hit_tokens"]
        assert found[1].read_bytes()[:8] in (b"\x89PNG\r\n\x1a\n", b"<?xml ve")


def test_a_plot_without_matplotlib_is_refused_before_the_replay(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = refused(capsys, trace, "--plot", "rates.png")
    assert "pip install 'foreword[plot]'" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--policy", "clock"], f"no policy 'clock' is built; there are {', '.join(POLICY_NAMES)}"),
        (["--compare", "clock@5"], "no policy 'clock' is built"),
        (["--compare", "lru"], "'lru' is no setting: write it as lru@1409"),
        (["--blocks", "0"], "'0' is no capacity"),
        (["--blocks", "5,"], "'' is no capacity"),
        (["--blocks", "1.5"], "'1.5' is no capacity"),
        (["--blocks", "1+2+3+4"], "'1+2+3+4' is no capacity"),
        (["--blocks", "5", "--compare", "lru@5"], "both say how large"),
        (["--policy", "lru", "--compare", "lru@5"], "without --policy"),
        (["--host", "1GiB"], "--device"),
        (["--device", "1GiB"], "--bytes-per-token"),
        (["--device", "1KiB", "--bytes-per-token", "1024"], "less than a block of 524,288 bytes"),
        (["--compare", "fifo@5+5"], "fifo@5+5: fifo is one queue"),
        (["--warmup", "1"], "'1' is no share"),
        (["--restart-at", "nan"], "'nan' is no share"),
        (["--plot", "rates.gif"], "ends in neither of .png, .svg"),
        (["--csv", "no/such/folder.csv"], "no/such/folder.csv cannot be written"),
        (["--speed", "5"], "unrecognized arguments: --speed"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    trace: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert told in refused(capsys, trace, *words)


def test_a_bad_trace_is_one_clear_line_with_its_place(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.jsonl"
    assert f"{missing} cannot be read" in refused(capsys, missing)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "there is no request in it" in refused(capsys, empty)
    text = trace.read_text()
    trace.write_text(text[:-30])
    assert f"{trace}, line 6: " in refused(capsys, trace)
    assert replayed(capsys, trace, "--bad-lines", "skip")["trace"]["requests"] == 5
    trace.write_text(text + '{"token_ids": [1, 2]}\n')
    assert f"{trace}, line 7: " in refused(capsys, trace)


def test_a_trace_may_come_from_standard_input(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = replayed(capsys, trace, "--blocks", "3")
    with trace.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert replayed(capsys, "-", "--blocks", "3") == expected


def test_progress_is_for_a_terminal_and_beside_the_result(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(trace), "--json"]) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["replay", str(trace), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.out == quiet.out
    assert " %" in shown.err
    assert shown.err.endswith("\r\x1b[K")


def test_lengths_alone_give_no_hit_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n")
    assert "no hit rate" in refused(capsys, path)


def test_first_tokens_in_virtual_time_are_drawn(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    picture = tmp_path / "first.svg"
    words = ["--model", "smollm2-135m", "--hardware", "h100", "--plot", str(picture)]
    assert cli.main(["replay", str(trace), *words]) == 0
    assert "first token" in capsys.readouterr().out
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tier", "device=1GB@1GB/s"], "each has a name of its own"),
        (["--tier", "a=1GB@1GB/s", "--tier", "a=2GB@1GB/s"], "each has a name of its own"),
        (["--workers", "99999"], "99999 workers are more than 10,000"),
        (["--engine", "nowhere.jsonl"], "--engine and --model both say what serves"),
    ],
)
def test_what_cannot_serve_in_virtual_time(
    trace: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, trace, "--model", "smollm2-135m", "--hardware", "h100", *words)


def test_what_goes_below_is_compared(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = replayed(capsys, trace, "--blocks", "3+9", "--store", "gain,on-second-use")
    assert columns(result["rows"], "store") == [("gain",), ("on-second-use",)]
    assert any("to move a block is taken to cost 0.5" in one for one in result["left_out"])
    result = replayed(capsys, trace, "--compare", "lru@3+9,lru@3+9:write-back")
    assert columns(result["rows"], "store") == [("write-through",), ("write-back",)]
    words = "there is no store=all; it may be gain, write-through, on-second-use, write-back"
    assert words in refused(capsys, trace, "--store", "all")
    assert words in refused(capsys, trace, "--compare", "lru@3+9:all")
    assert "without --store" in refused(capsys, trace, "--compare", "lru@3", "--store", "gain")
