"""The default model's conversion: once, whole or not at all; and remembered file digests."""

import os
import time
from hashlib import sha256
from pathlib import Path

import pytest

from foreword.engine import gguf
from foreword.store.files import cache_folder, digest_of


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for the GGUF; the conversion itself is replaced."""
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"first")
    return path


def fake_conversion(monkeypatch: pytest.MonkeyPatch, then: object = None) -> list[Path]:
    """Replace the conversion by one that writes one file, calls `then`, and is counted."""
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "config.json").write_bytes(source.read_bytes())
        if callable(then):
            then()

    monkeypatch.setattr(gguf, "_convert", convert)
    return calls


def test_converted_once_for_each_content(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_conversion(monkeypatch)
    folder = gguf.converted(source)
    assert gguf.converted(source) == folder
    assert len(calls) == 1
    source.write_bytes(b"second")
    assert gguf.converted(source) != folder
    assert len(calls) == 2
    assert sorted(p.name for p in folder.parent.iterdir()) == sorted(
        p.name for p in (folder, gguf.converted(source))
    ), "no part of a conversion stays"


def test_a_conversion_that_fails_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("killed")

    fake_conversion(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="killed"):
        gguf.converted(source)
    assert list((cache_folder() / "models").iterdir()) == []
    calls = fake_conversion(monkeypatch)
    assert (gguf.converted(source) / "config.json").read_bytes() == b"first"
    assert len(calls) == 1


def test_two_processes_at_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner: list[Path] = []

    def other_process() -> None:
        if not inner:
            inner.append(Path())
            inner.append(gguf.converted(source))

    fake_conversion(monkeypatch, other_process)
    assert gguf.converted(source) == inner[1]
    assert [p.name for p in inner[1].parent.iterdir()] == [inner[1].name]


def test_only_abandoned_parts_are_removed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_conversion(monkeypatch)
    models = cache_folder() / "models"
    for name, age_s in (("new", 60), ("old", 7200)):
        (models / f".part-{name}").mkdir(parents=True)
        os.utime(models / f".part-{name}", (time.time() - age_s,) * 2)
    gguf.converted(source)
    assert (models / ".part-new").is_dir()
    assert not (models / ".part-old").exists()


def test_digests_are_remembered_until_the_file_changes(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digest_of(source) == sha256(b"first").hexdigest()
    (memo,) = (cache_folder() / "digests").iterdir()
    memo.write_text("0" * 64)
    assert digest_of(source) == "0" * 64
    memo.write_text("")  # as a power cut may leave it
    assert digest_of(source) == sha256(b"first").hexdigest()
    os.utime(source, ns=(1, 1))
    assert digest_of(source) == sha256(b"first").hexdigest()
    monkeypatch.setenv("FOREWORD_CACHE_DIR", "/proc/nowhere")
    assert digest_of(source) == sha256(b"first").hexdigest(), "an unwritable cache is no error"
