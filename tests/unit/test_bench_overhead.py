"""`foreword bench overhead` runs to its end, with the calls that the engine makes today."""

import json
from pathlib import Path

import pytest

from foreword.cli import bench_overhead
from foreword.cli import main as cli
from tiny import make_tiny


def test_every_figure_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_overhead, "NUM_BLOCKS", 64)
    monkeypatch.setattr(bench_overhead, "PLANNED", (4, 50))
    folder = make_tiny(tmp_path / "model")
    words = ["--pairs", "1", "--prompts", "2", "--prompt-tokens", "64", "--new-tokens", "2"]
    words += ["--kv-bytes", "1MiB", "--model", str(folder)]
    assert cli.main(["bench", "overhead", *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 < result["cpu_share"] < 1
    assert result["us_per_block"] > result["sha_us_per_block"] > 0
    assert result["plan_request_us"] > 0
    assert result["place_block_us"] > 0
    assert result["plan_sha_us_per_block"] > 0
    assert result["pairs"] == 1
