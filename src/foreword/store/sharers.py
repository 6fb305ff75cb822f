"""Sharers: which identities have stored blocks in a folder, so that people can see why two engines
share nothing. Nothing is decided by these files."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from foreword.core.identity import Identity
from foreword.store.files import write_whole

MOST_LEFT = 100  # of a folder: some engines have another identity at every start


def leave_identity(folder: Path, identity: Identity) -> None:
    """Write down that blocks of this identity are stored there, and forget the oldest of too many.
    What cannot be written is left."""
    path = folder / f"identity-{identity.root_hash().hex()[:16]}.json"
    with suppress(OSError):
        if not path.exists():
            write_whole(path, json.dumps(asdict(identity), indent=1))
            for old in _newest_first(folder)[MOST_LEFT:]:
                old.unlink(missing_ok=True)


def identities(folder: Path) -> list[Identity]:
    """Those that were left there and can be read, the newest first. Raises OSError where the folder
    cannot be listed."""
    found = []
    for path in _newest_first(folder):
        with suppress(OSError, ValueError, TypeError):
            found.append(Identity(**json.loads(path.read_text())))
    return found


def _newest_first(folder: Path) -> list[Path]:
    paths = [path for path in folder.iterdir() if path.match("identity-*.json")]
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)
