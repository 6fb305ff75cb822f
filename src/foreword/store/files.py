"""Where this machine keeps what is made once: converted models and digests of large files."""

import os
import re
import tempfile
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path


def cache_folder() -> Path:
    """FOREWORD_CACHE_DIR, else `foreword` in the user's cache folder. Not created here."""
    if own := os.environ.get("FOREWORD_CACHE_DIR"):
        return Path(own)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "foreword"


def kv_folder() -> Path:
    """Where KV is kept on disk, for all processes of this user."""
    return cache_folder() / "kv"


def digest_of(path: Path) -> str:
    """SHA-256 of a file in hex; remembered by path, size, mtime and inode. The hub's cache names
    its large files by it."""
    path = path.resolve()
    if path.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", path.name):
        return path.name
    stat = path.stat()
    key = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    memo = cache_folder() / "digests" / sha256(key.encode()).hexdigest()
    with suppress(OSError):
        known = memo.read_text()
        if re.fullmatch("[0-9a-f]{64}", known):  # a power cut may have left it empty
            return known
    with path.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    with suppress(OSError):  # a folder that cannot be written costs a second reading, no more
        write_whole(memo, digest)
    return digest


def digest_of_weights(folder: Path) -> str:
    """SHA-256 in hex of a model's weights: of the digests of its safetensors files, or where there
    are none, of other weights' files. Raises FileNotFoundError where there are none either."""
    for pattern in ("*.safetensors", "*.bin", "*.gguf"):
        if files := sorted(folder.glob(pattern)):
            return sha256("".join(digest_of(file) for file in files).encode()).hexdigest()
    raise FileNotFoundError(f"no weights in {folder}")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(part).replace(path)
    except OSError:  # a full disk
        Path(part).unlink(missing_ok=True)
        raise
