"""What steps and reads cost is measured once, remembered, and learned further."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.cli import calibrate
from foreword.cli import main as cli
from foreword.cli.failure import EXIT_CODES
from foreword.cli.measure import ask
from foreword.core.cost import StepCost, StepFit, TierCost
from foreword.core.request import SamplingParams
from foreword.engine import calibration, known_costs
from foreword.engine.calibration import SHAPES, Shape, scratch_folder, time_reads, time_steps
from foreword.engine.engine import TorchEngine
from foreword.engine.known_costs import Memo, memo_path
from foreword.engine.runner import Runner
from foreword.engine.settings import EngineSettings
from foreword.engine.tiers import EXPECTED, fit_of
from foreword.store.disk import DiskStore
from foreword.store.host import HostStore
from tiny import make_tiny

COST = StepCost(2e-5, 3e-9, 5e-4, 1e-4, 4e-9, 7e-5)
RECORD_BYTES = 70_000


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    """Of a server of a tiny model with both tiers, and a cache folder of its own."""
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 4 << 20)
    monkeypatch.setattr(known_costs, "READS_S", 0.1)
    return EngineSettings(
        str(make_tiny(tmp_path / "model")),
        kv_bytes=4 << 20,
        host_bytes=1 << 22,
        disk_bytes=1 << 22,
        disk_folder=tmp_path / "kv",
        exact=False,
        calibrate=True,
    )


def memo_of(engine: TorchEngine) -> Memo:
    return Memo.recall(memo_path(engine.runner))


def close(engine: TorchEngine) -> None:
    asyncio.run(_stop(engine))


async def _stop(engine: TorchEngine) -> None:
    engine.start()
    await engine.stop(1.0)


def steps_by(monkeypatch: pytest.MonkeyPatch, cost: StepCost, now_s: list[float]) -> list[Shape]:
    """Steps take by this clock what `cost` says. Returns those that run."""
    ran: list[Shape] = []

    def run(_runner: Runner, shape: Shape) -> float:
        ran.append(shape)
        now_s[0] += cost.step_s(shape.work)
        return cost.step_s(shape.work)

    monkeypatch.setattr(calibration, "_run", run)
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now_s[0])
    return ran


def test_costs_of_steps_are_found(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine.load(replace(settings, calibrate=False))
    steps_by(monkeypatch, COST, [0.0])
    wide = replace(engine.model, max_model_len=10_000)
    monkeypatch.setattr(engine.runner, "model", wide)
    monkeypatch.setattr(engine.runner.kv, "num_blocks", 1000)
    found = time_steps(engine.runner, 10.0)
    assert set(found.seconds) == set(SHAPES)
    assert found.are_enough
    assert found.error < 1e-6
    cost = found.cost
    assert cost is not None
    assert cost.prefill_s(700, 5000) == pytest.approx(COST.prefill_s(700, 5000))
    close(engine)


def test_what_would_take_too_long_is_not_run(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine.load(replace(settings, calibrate=False))
    now_s = [0.0]
    slow = StepCost(*(1000 * getattr(COST, name) for name in StepCost.__dataclass_fields__))
    ran = steps_by(monkeypatch, slow, now_s)
    found = time_steps(engine.runner, 5.0)
    assert now_s[0] < 5.0 + 2 * slow.prefill_s(16), "two steps say how long the others may take"
    assert not found.are_enough
    assert max(shape.num_tokens for shape in ran) == 16
    assert time_steps(engine.runner, 5.0, []).cost is None
    close(engine)


def test_a_first_start_calibrates_and_the_next_remembers(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "foreword.engine")
    first = TorchEngine.load(settings)
    costs = first.cache.restores.costs
    assert costs is not None
    assert costs.step is not None
    assert costs.step.prefill_s(100) > 0
    assert [fit.cost for fit in costs.tiers] != [EXPECTED["host"], EXPECTED["disk"]]
    assert "calibrating: " in caplog.text
    assert "costs, calibrated in " in caplog.text
    assert "GB/s after" in caplog.text
    close(first)
    caplog.clear()

    def refuse(*_arguments: object) -> None:
        pytest.fail("it measured again")

    monkeypatch.setattr(known_costs, "time_steps", refuse)
    monkeypatch.setattr(known_costs, "measure_reads", refuse)
    second = TorchEngine.load(settings)
    again = second.cache.restores.costs
    assert again is not None
    assert again.step == costs.step
    assert [fit.cost for fit in again.tiers] == [fit.cost for fit in costs.tiers]
    assert [(fit.error, fit.late_share) for fit in again.tiers] == [
        (fit.error, fit.late_share) for fit in costs.tiers
    ]
    assert "costs, as remembered: " in caplog.text
    assert not list(settings.disk_folder.glob("calibration-*"))
    close(second)


def test_what_a_server_learns_is_there_at_its_next_start(settings: EngineSettings) -> None:
    async def serve() -> TorchEngine:
        engine = TorchEngine.load(settings)
        engine.start()
        for at in range(3):
            await ask(engine, range(at, at + 60), SamplingParams(20, ignore_eos=True))
        await engine.stop(5.0)
        return engine

    engine = asyncio.run(serve())
    calibrated = len([shape for shape in SHAPES if shape.context + shape.num_tokens <= 1024])
    memo = memo_of(engine)
    assert memo.steps is not None
    assert memo.steps.num_steps > calibrated + 50
    costs = engine.cache.restores.costs
    assert costs is not None
    assert costs.step is not None
    next_one = TorchEngine.load(settings)
    known = next_one.cache.restores.costs
    assert known is not None
    assert known.step == memo.steps.solve()
    assert next_one._counts.recent.older > 0, "and newer steps count more"
    close(next_one)


def test_nothing_is_measured_or_written_unless_it_is_asked_for(
    settings: EngineSettings, tmp_path: Path
) -> None:
    for one in (replace(settings, calibrate=False), replace(settings, prefix_caching=False)):
        engine = TorchEngine.load(one)
        costs = engine.cache.restores.costs
        assert costs is None or costs.step is None
        close(engine)
    assert not (tmp_path / "cache" / "costs").exists()


def test_another_folder_is_measured_anew(settings: EngineSettings, tmp_path: Path) -> None:
    close(TorchEngine.load(settings))
    elsewhere = replace(settings, disk_folder=tmp_path / "elsewhere")
    engine = TorchEngine.load(elsewhere)
    assert memo_of(engine).reads["disk"].place == str(tmp_path / "elsewhere")
    close(engine)


def test_costs_are_of_a_model_and_a_machine(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine.load(replace(settings, calibrate=False))
    paths = {memo_path(engine.runner)}
    other = TorchEngine.load(replace(settings, calibrate=False, dtype="float32"))
    paths.add(memo_path(other.runner))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    paths.add(memo_path(engine.runner))
    torch.set_num_threads(threads)
    monkeypatch.setattr(known_costs, "machine", lambda _device: "another")
    paths.add(memo_path(engine.runner))
    assert len(paths) == 4
    for one in (engine, other):
        close(one)


def spoiled(body: dict[str, Any]) -> Sequence[str]:
    def with_(**changes: object) -> str:
        return json.dumps({**body, **changes})

    steps, disk = body["steps"], body["tiers"]["disk"]
    return [
        "",
        "{",
        "[]",
        "null",
        with_(format=99),
        with_(key="another model's"),
        with_(steps={**steps, "products": steps["products"][1:]}),
        with_(steps={**steps, "moments": [float("nan")] * 6}),
        with_(steps={**steps, "moments": ["1"] * 6}),
        with_(steps={**steps, "weight": 0}),
        with_(steps={**steps, "products": [[0.0] * 6] * 6}),
        with_(tiers={"disk": {**disk, "bytes_per_s": 0}}),
        with_(tiers={"disk": {**disk, "latency_s": -1}}),
        with_(tiers={"disk": {"place": ""}}),
        with_(tiers=[1]),
        json.dumps({"format": 1}),
    ]


def test_a_file_that_is_damaged_or_foreign_costs_a_line(
    settings: EngineSettings, caplog: pytest.LogCaptureFixture
) -> None:
    engine = TorchEngine.load(settings)
    close(engine)
    path = memo_path(engine.runner)
    texts = spoiled(json.loads(path.read_text()))
    for text in texts:
        path.write_text(text)
        caplog.clear()
        memo = Memo.recall(path)
        assert (memo.steps, memo.reads) == (None, {}), text
        assert len(caplog.records) == 1, text
        assert f"{path} is not used" in caplog.text
    close(TorchEngine.load(settings))
    assert memo_of(engine).steps is not None, "and is written anew"


def test_a_folder_that_cannot_be_written_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    Memo(tmp_path / "file" / "costs.json").save()
    assert "the costs are not remembered" in caplog.text
    assert Memo.recall(tmp_path / "none.json").steps is None


def test_reads_are_timed_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 4 << 20)
    for lends in (True, False):
        fit = fit_of(TierCost(1.0, 1.0), RECORD_BYTES)
        store = HostStore(8 << 20, RECORD_BYTES)
        assert time_reads(store, RECORD_BYTES, fit, 0.05, lends=lends)
        assert fit.num_reads >= 15
        assert fit.cost.load_s(1 << 20) < 1.0
        store.close()
    with scratch_folder(tmp_path) as folder:
        disk = DiskStore(folder, 8 << 20, RECORD_BYTES)
        monkeypatch.setattr(disk, "get", lambda hashes, _buffers: [0] * len(hashes))
        with pytest.raises(OSError, match="of the disk tier was lost"):
            time_reads(disk, RECORD_BYTES, fit, 0.05)
        disk.close()
    full = HostStore(2 * RECORD_BYTES, RECORD_BYTES)
    assert not time_reads(full, RECORD_BYTES, fit, 0.05)
    full.close()


def test_what_a_crash_leaves_goes_with_the_next_calibration(tmp_path: Path) -> None:
    old, new = tmp_path / "calibration-old", tmp_path / "calibration-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "part").write_bytes(b"x")
    os.utime(old, (0, time.time() - 3600))
    with scratch_folder(tmp_path) as scratch:
        assert scratch.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["calibration-new"]


def test_the_command_says_what_a_server_begins_with(
    settings: EngineSettings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "READS_S", 0.1)
    words = ["calibrate", "--model", settings.model, "--kv-bytes", "4MiB", "--exact", "off"]
    words += ["--disk", f"4MiB:{settings.disk_folder}"]
    assert cli.main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["prefill"]
    assert row["context"] == 0
    assert row["seconds_per_1000_tokens"] * row["break_even_bytes_per_s"] == pytest.approx(
        1000 / 16 * 4352
    )
    assert result["tiers"].keys() == {"host", "disk"}
    assert min(tier["gb_per_s"] for tier in result["tiers"].values()) > 0
    assert result["error"] >= 0
    assert len(result["steps"]) > 4
    engine = TorchEngine.load(settings)
    costs = engine.cache.restores.costs
    assert costs is not None
    assert costs.step is not None
    assert 10 * costs.compute_s(0, 1000) == pytest.approx(10 * row["seconds_per_1000_tokens"])
    close(engine)
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    for part in ("prefill after", "loading pays from", "disk", "off on average", "Remembered in"):
        assert part in text


def test_the_command_fails_where_steps_take_too_long(
    settings: EngineSettings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "STEPS_S", 0.0)
    words = ["calibrate", "--model", settings.model, "--disk", "0", "--exact", "off"]
    assert cli.main([*words, "--kv-bytes", "4MiB"]) == EXIT_CODES["failed"]
    assert "to tell their costs" in capsys.readouterr().err


def test_sums_of_another_weight_go_on(settings: EngineSettings) -> None:
    fit = StepFit(older=1 / 64)
    for shape in SHAPES * 40:
        fit.add(shape.work, COST.step_s(shape.work))
    memo = Memo(settings.disk_folder.parent / "cache" / "costs" / "x.json", fit)
    memo.save()
    found = Memo.recall(memo.path).steps
    assert found == fit
