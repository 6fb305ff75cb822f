"""`foreword bench restore`: what it measures and against what. Its figures are not judged here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from foreword.cli import main as cli
from foreword.cli.bench_restore import Speed, compared

# Answers as fio does, and leaves what it was asked.
FIO = """#!{python}
import json, sys
open("{asked}", "a").write(json.dumps(sys.argv[1:]) + "\\n")
job = {{"read": {{"io_bytes": 500_000_000, "runtime": 250}}, "job_runtime": 250}}
print(json.dumps({{"jobs": [{{**job, "usr_cpu": 4.0, "sys_cpu": 16.0}}] * 4}}))
"""


def measure(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[dict[str, Any], str]:
    folder.mkdir(exist_ok=True)
    words = ["--bytes", "1MiB", "--kv-bytes", "57600", "--pairs", "2", "--pause", "0"]
    assert cli.main(["bench", "restore", *words, "--json", "--folder", str(folder)]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_disk_beside_fio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, asked = tmp_path / "fio", tmp_path / "asked"
    program.write_text(FIO.format(python=sys.executable, asked=asked))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    result, _ = measure(capsys, tmp_path / "disk")
    disk = result["tiers"][-1]
    assert (disk["tier"], disk["threads"], disk["limit"]) == ("disk", 4, "fio")
    assert (disk["limit_gb_per_s"], disk["limit_gb_per_cpu_s"]) == (8.0, 10.0)
    runs = [json.loads(line) for line in asked.read_text().splitlines()]
    assert len(runs) == 3  # the first pair is not counted
    wanted = {"--direct=1", "--rw=randread", f"--bs={4 * 61440}", "--numjobs=4"}
    wanted |= {f"--size={16 * 61440}", f"--io_size={4 * 61440}"}
    assert all(wanted < set(words) for words in runs)
    assert list((tmp_path / "disk").iterdir()) == []


def test_without_fio_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result, said = measure(capsys, tmp_path)
    assert "apt install fio" in said
    assert result["pairs"] == 2
    assert [(tier["tier"], tier["threads"], tier["limit"]) for tier in result["tiers"]] == [
        ("host", 1, "memcpy"),
        ("host", 2, "memcpy"),
        ("disk", 4, "bare reads"),
    ]
    for tier in result["tiers"]:
        for share in ("share", "share_per_cpu_s"):
            low, high = tier[f"{share}_interval"]
            assert 0 < low <= tier[share] <= high


def test_a_block_has_all_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--kv-bytes", "60000", "--bytes", "1MiB", "--folder", str(tmp_path)]
    assert cli.main(["bench", "restore", *words]) == 2
    assert "not a multiple of 1,920" in capsys.readouterr().err


def test_shares_are_of_pairs() -> None:
    pairs = [(Speed(1.0, 4.0), Speed(2.0, 4.0)), (Speed(4.0, 8.0), Speed(2.0, 2.0))]
    figures = compared(pairs)
    assert figures["share"] == pytest.approx(1.0)
    assert figures["share_interval"] == pytest.approx([0.5, 2.0])
    assert figures["share_per_cpu_s"] == pytest.approx(2.0)
    assert (figures["gb_per_s"], figures["limit_gb_per_s"]) == (2.5, 2.0)
