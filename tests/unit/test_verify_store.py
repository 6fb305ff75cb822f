"""`foreword verify --store`: a scorecard that would show a fault that is served."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.cli import main as cli
from foreword.cli import scratch
from foreword.cli.verify_files import DAMAGES
from foreword.store.codec import BadRecord


def verify(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["verify", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def outcomes(result: dict[str, Any], store: str) -> dict[str, str]:
    return {row["fault"]: row["outcome"] for row in result["results"] if row["store"] == store}


def test_no_fault_of_the_default_stores_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "new"))
    code, result = verify(capsys)
    assert (code, result["ok"], result["silent"]) == (0, True, 0)
    host, disk = outcomes(result, "host"), outcomes(result, "disk")
    assert host == {
        "bit flip": "miss",
        "swapped record": "miss",
        "truncation": "miss",
        "torn write": "miss",
        "stale record": "miss",
        "loss": "miss",
        "delay": "recovered",
        "hang": "miss",
        "error": "error",
        "full disk": "refused",
        "crash": "error",
        "another identity": "miss",
        "over its budget": "refused",
    }
    assert host.items() <= disk.items()
    damaged = {f"{name}, {state}" for name in DAMAGES for state in ("open", "closed")}
    others = {"a disk that fills", "a process killed while it puts"}
    assert set(disk) == {*host, *damaged, *others}
    assert "SILENT" not in disk.values()
    assert disk["a bit flipped in each page, open"] == "miss"
    assert list((tmp_path / "new").iterdir()) == []  # the scratch folder is gone


def test_what_is_in_the_folder_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "part-0000.table").write_bytes(b"mine")
    code, result = verify(capsys, "--store", tmp_path.as_uri())
    assert (code, {row["store"] for row in result["results"]}) == (0, {"disk"})
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]


def test_without_the_check_faults_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scorecard compares bytes itself and does not take the check's word."""

    def unchecked(record: memoryview, _key: object) -> None:
        if not record:
            raise BadRecord("nothing")

    monkeypatch.setattr(scratch, "check", unchecked)
    code, result = verify(capsys, "--store", "host:", "--store", tmp_path.as_uri())
    assert (code, result["ok"]) == (1, False)
    assert result["silent"] > 0
    wrong = {"bit flip", "swapped record", "truncation", "torn write", "stale record"}
    on_disk = {"pages zeroed, open", "records swapped, closed", "a bit flipped in each page, open"}
    for store, expected in (("host", wrong), ("disk", wrong | on_disk)):
        found = outcomes(result, store)
        assert {fault for fault in expected if found[fault] != "SILENT"} == set()
        assert found["loss"] == found["another identity"] == "miss"


def test_a_scorecard_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--store", "host:"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "store what befalls it worst what came of the blocks"
    assert lines[1] == "host bit flip miss 16 miss"
    assert "no wrong byte was served in 13 kinds of faults" in lines
    assert lines[-2:] == ["ok True", "silent 0"]


@pytest.mark.parametrize("url", ["", "host:x", "file:relative", "file://far/path", "s3://bucket"])
def test_what_is_no_store_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--store", url]) == 2
    assert "is no store: host: or file:///PATH" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["verify", "--store", (tmp_path / "file").as_uri()]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_writers_that_are_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = verify(capsys, "--kills", "1", "--store", tmp_path.as_uri())
    assert code == 0
    assert result["kills"]["rounds"] == 1
    assert result["kills"]["kills"] >= 2
    assert result["kills"]["faults"] == []
    assert not list(tmp_path.iterdir())
    assert cli.main(["verify", "--kills", "1", "--store", "host:"]) == 2
