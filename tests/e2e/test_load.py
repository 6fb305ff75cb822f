"""`foreword bench load` on a tiny model: what it plans, and that nothing is left behind."""

from pathlib import Path

import pytest

from foreword.cli import bench_load
from foreword.cli.main import command_parser
from tiny import make_tiny


def test_plans_are_as_asked() -> None:
    args = command_parser("bench load").parse_args(["--requests", "2000"])
    plans = bench_load.plans(args)
    assert plans == bench_load.plans(args)
    assert {plan.leaves for plan in plans} == {"", "early", "late"}
    assert 150 < sum(bool(plan.leaves) for plan in plans) < 250
    long = [plan.prompt for plan in plans if len(plan.prompt) > args.opening]
    assert 900 < len(long) < 1100
    assert len({tuple(prompt[: args.opening]) for prompt in long}) == bench_load.NUM_OPENINGS


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "cache"))
    model = make_tiny(tmp_path / "model")
    words = f"--model {model} --exact off --threads 1 --kv-bytes 1MiB --requests 60 --leave 30"
    args = command_parser("bench load").parse_args(words.split())
    leaving = sum(bool(plan.leaves) for plan in bench_load.plans(args))
    assert leaving > 10
    result = bench_load.run(args)
    assert result["ok"], result
    for name in ("cache", "no_cache"):
        load = result[name]
        assert load["errors"] == {}
        assert load["left"] == leaving
        assert {"leased_bytes", "running", "waiting"} <= set(load["held"])
        assert set(load["held"].values()) == {0.0}
        ttft = load["ttft_s"]
        assert 0 < ttft["p50"] <= ttft["p95"] <= ttft["p99"]
        assert set(load["memory_bytes"]) == {"start", "tenth", "end"}
    assert result["cache"]["reused"] > 0.3
    assert result["no_cache"]["reused"] == 0.0
