"""`foreword verify --sharing`: who has stored in a folder, and why two share nothing."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from foreword.cli import main as cli
from foreword.cli.failure import EXIT_CODES
from foreword.cli.verify_store import OURS
from foreword.store import sharers
from foreword.store.sharers import identities, leave_identity


def test_it_names_the_fields_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_identity(tmp_path, OURS)
    leave_identity(tmp_path, OURS)
    other = replace(OURS, layout='{"engine": "b", "kv": 1}', dtype="b" * 200)
    third = replace(other, layout='{"engine": "c", "kv": 1}')
    leave_identity(tmp_path, other)
    (tmp_path / "identity-broken.json").write_text("{")
    assert cli.main(["verify", "--sharing", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["identities"]) == 2
    assert [pair["differ"] for pair in result["pairs"]] == [["dtype", "layout.engine", "layout.kv"]]
    leave_identity(tmp_path, third)
    assert cli.main(["verify", "--sharing", str(tmp_path)]) == 0
    assert "share nothing: layout.engine\n" in capsys.readouterr().out


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--sharing", str(tmp_path / "none")]) == EXIT_CODES["settings"]
    assert "cannot be read" in capsys.readouterr().err


def test_what_cannot_be_written_is_left(tmp_path: Path) -> None:
    leave_identity(tmp_path / "none" / "file", OURS)
    (tmp_path / "file").write_text("")
    leave_identity(tmp_path / "file", OURS)
    assert identities(tmp_path) == []


def test_the_oldest_of_too_many_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharers, "MOST_LEFT", 3)
    for at in range(5):
        leave_identity(tmp_path, replace(OURS, lora=str(at)))
        for path in tmp_path.iterdir():
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
    assert [identity.lora for identity in identities(tmp_path)] == ["4", "3", "2"]
