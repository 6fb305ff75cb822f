"""`foreword plan`: from words to figures, and what it says of words that cannot be."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from configs import LLAMA
from foreword.cli.main import main

BASE = ["plan", "--model", "llama-3.1-8b", "--hardware", "h100"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(capsys, *words, "--json"))
    return found


def test_figures_and_tables_of_the_reference_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *BASE)
    for words in (
        "131,072 B (128 KiB)",
        " 16.2 µs\n",
        "8.07 GB/s",
        "10,000  disk     1.31 GB  93.6 ms     189 ms   6.94 GB/s  load",
        "Note: prefill at the 16-bit peak of the data sheet",
    ):
        assert words in text
    assert " = " not in text
    explained = said(capsys, *BASE, "--explain")
    assert re.search(r"= KV of a token ÷ prefill per token: KV of a token 131,072", explained)
    assert "us_per_token = KV of a token × shared_by ÷ bandwidth" in explained


def test_tiers_prices_and_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--workload",
        "chat:sessions=4,turns=6,think=1,rate=0.5",
        "--mfu",
        "0.4",
        "--kv-dtype",
        "fp8",
    ]
    words += ["--tier", "host=2GB@64GB/s", "--tier", "disk=1TB@14GB/s,shared_by=8,latency=0.1ms"]
    words += ["--price", "disk=100/TB", "--price", "host=3/GB", "--hardware", "h100:2"]
    found = as_json(capsys, *BASE, *words)
    assert found["figures"]["KV of a token"]["value"] == 65_536
    assert found["figures"]["of them new, replies' KV kept"]["value"] == 4600
    rows = found["tables"]["tiers"]["rows"]
    assert [row["tier"] for row in rows] == ["device", "device of 2 replicas", "host", "disk"]
    assert rows[3]["us_per_token"] == pytest.approx(65_536 * 8 / 14e9 * 1e6)
    assert found["figures"]["recommended host"]["value"] == 0  # the device has room for all
    ways = [row["way"] for row in found["tables"]["time to the first token"]["rows"]]
    assert ways == ["nothing kept", "device alone"]


def test_a_trace_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {"timestamp": 1000 * at, "input_length": 1500, "output_length": 9, "hash_ids": ids}
        )
        for at, ids in enumerate(([1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 2, 8]))
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    found = as_json(capsys, *BASE, "--trace", str(path))
    last = found["tables"]["hit rate by size"]["rows"][-1]
    assert last["hit_share"] == pytest.approx(2 * 1024 / 6000)
    assert found["figures"]["replicas, nothing kept"]["inputs"]["requests per second"] == (
        pytest.approx(4 / 3)
    )


def test_a_model_from_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = as_json(capsys, "plan", "--model", str(tmp_path), "--hardware", "l40s")
    assert found["model"]["attention"] == "GQA"
    assert found["figures"]["KV of a token"]["value"] == 131_072


def test_the_commands_of_the_guide_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line))
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "plan.md").read_text()
    commands = re.findall(r"^foreword (plan .*)$", guide, re.MULTILINE)
    assert len(commands) == 4
    shown = "".join(said(capsys, *command.split()) for command in commands)
    for figure in ("131,072 B (128 KiB)", "8.07 GB/s", "1.31 GB", "20.5 ms", "93.6 ms", "189 ms"):
        assert figure in guide
        assert figure in shown


def test_costs_that_an_engine_learnt_go_before_those_of_data_sheets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = {"foreword": "1", "started": 1.0, "model": "m", "blocks": 50, "block_size": 16}
    run |= {"block_bytes": 16 * 23_040, "max_num_seqs": 8, "max_batch_tokens": 512}
    run |= {"max_prefill_tokens": 2048, "reuse": True, "tiers": [{"name": "disk", "blocks": 100}]}
    costs = {"steps": 9, "per_token_s": 0.001, "per_step_s": 0.01, "read_block_s": [0.002]}
    log = tmp_path / "log.jsonl"
    words = ["plan", "--model", "smollm2-135m", "--hardware", "here", "--costs", str(log)]
    log.write_text(json.dumps(run) + "\n" + json.dumps({"costs": costs}) + "\n")
    found = as_json(capsys, *words)
    assert found["figures"]["prefill per token"]["value"] == 0.001
    (disk,) = [row for row in found["tables"]["tiers"]["rows"] if row["tier"] != "device"]
    assert disk["tokens"] == 1600
    assert disk["us_per_token"] == pytest.approx(0.002 / 16 * 1e6)
    row = found["tables"]["load or recompute"]["rows"][0]
    assert row["recompute_s"] == pytest.approx(1.01)
    for text, told in ((json.dumps(run), "a log without costs"), ("{}", "no log of foreword")):
        log.write_text(text + "\n")
        assert main(words) == 2
        assert told in capsys.readouterr().err


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "plan", "--model", "smollm2-135m", "--hardware", "here")
    hardware = found["hardware"]
    assert all(hardware[name] > 1e6 for name in ("flops_per_s", "disk_bytes_per_s", "hbm_bytes"))
    assert [row["tier"] for row in found["tables"]["tiers"]["rows"]] == ["device", "host", "disk"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--model llama-3.1-9b --hardware h100", "is no file and none of llama-3.1-8b"),
        ("--model llama-3.1-8b --hardware h10", "--hardware h10 is none of h100"),
        ("--model llama-3.1-8b --hardware h100:x", "no number of devices"),
        ("--model llama-3.1-70b --hardware h100", "more devices (--hardware h100:N)"),
        ("--model llama-3.1-8b --hardware h100 --mfu 2", "'2' is no part of a whole"),
        ("--model llama-3.1-8b --hardware h100 --tier disk=1TB", "is no tier: write it as"),
        ("--model llama-3.1-8b --hardware h100 --tier d=1TB@1GB/s,x=1", "can be shared_by=8"),
        ("--model llama-3.1-8b --hardware h100 --price disk=3", "is no price"),
        ("--model llama-3.1-8b --hardware h100 --price tape=3/GB", "only host, disk, network"),
        ("--model llama-3.1-8b --hardware h100 --workload talk", "no workload 'talk'"),
        ("--model llama-3.1-8b --hardware h100 --trace none.jsonl", "cannot be read: No such"),
        ("--model llama-3.1-8b --hardware h100 --trace - --workload chat", "not both"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) in (1, 2, 3, 5)
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
