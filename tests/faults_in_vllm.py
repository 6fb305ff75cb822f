"""Faults of what lies on disk while a real vLLM serves from it: our tier beside vLLM's own `fs`.

    .venv/bin/python tools/vllm_faults.py --json

runs this where the engines are installed. The same prompts, faults and checks for both tiers; our
tier also without its verification, to show that these faults change answers where nobody looks.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random

from tiny import make_tiny
from vllm_server import VllmServer
from vllm_trial import Score, Tier, Trial, ask, foreword, fs, new_prompt, serving

PAGE_BYTES = 4096
SMALL_DISK_BYTES = 16 << 20
UNVERIFIED = "flipped bits, not verified"


def flip(tier: Tier, draw: Random) -> None:
    """In each page of each block one bit of a float's exponent: 16 times as much, or as little."""
    for path in tier.files():
        with path.open("r+b") as file:
            pages = file.read()
            for start in range(0, len(pages), PAGE_BYTES):
                at = start + 192 + 4 * draw.randrange((PAGE_BYTES - 192) // 4) + 3
                if any(pages[start : start + PAGE_BYTES]) and at < len(pages):
                    file.seek(at)
                    file.write(bytes([pages[at] ^ 2]))


def swap(tier: Tier, draw: Random) -> None:
    """Each two blocks change places: of other prompts, or of other places in a prompt."""
    if tier.name == "fs":
        files = tier.files()
        draw.shuffle(files)
        for one, two in zip(files[::2], files[1::2], strict=False):
            one.rename(spare := one.with_suffix(".spare"))
            two.rename(one)
            spare.rename(two)
        return
    for path in tier.files():
        with path.open("r+b") as file:
            slots = list(_slots(path))
            draw.shuffle(slots)
            for (one, its), (two, others) in zip(slots[::2], slots[1::2], strict=False):
                file.seek(one)
                file.write(others)
                file.seek(two)
                file.write(its)


def truncate(tier: Tier, draw: Random) -> None:
    """Each file is half as long."""
    for path in tier.files():
        os.truncate(path, path.stat().st_size // 2)


def tear(tier: Tier, draw: Random) -> None:
    """Of every tenth block or so the second half is zeros, as a loss of power leaves it."""
    for path in tier.files():
        with path.open("r+b") as file:
            for at, record in _slots(path):
                if draw.random() < 0.1:
                    whole = len(record) // 2 // PAGE_BYTES * PAGE_BYTES
                    file.seek(at + whole)
                    file.write(bytes(len(record) - whole))


def _slots(path: Path) -> Iterator[tuple[int, bytes]]:
    """Where in a file which block's bytes lie; a file of `fs` is one block."""
    raw = path.read_bytes()
    table = path.with_suffix(".table")
    size = int.from_bytes(table.read_bytes()[16:24], "little") if table.exists() else len(raw)
    for at in range(0, len(raw), size):
        if any(raw[at : at + size]):
            yield at, raw[at : at + size]


DAMAGE: dict[str, Callable[[Tier, Random], None]] = {
    "flipped bits": flip,
    "swapped blocks": swap,
    "truncated files": truncate,
    "torn writes": tear,
}


def try_damage(server: VllmServer, tier: Tier, fault: str) -> Score:
    """What lies on disk is damaged while vLLM runs."""
    trial = Trial(server, tier, fault)
    trial.begin()
    DAMAGE[fault](tier, Random(fault))
    trial.first_round()
    trial.heal()
    return trial.score


def try_unverified(server: VllmServer, tier: Tier) -> Score:
    """Our own tier without its checks: what a fault does to answers where nobody looks."""
    trial = Trial(server, tier, UNVERIFIED)
    trial.begin()
    (tier.switches / "unverified").touch()
    flip(tier, Random(0))
    trial.first_round()
    (tier.switches / "unverified").unlink()
    trial.heal()
    return trial.score


def try_hang(server: VllmServer, tier: Tier) -> Score:
    """The disk does not answer. Ours: no call returns; `fs`: to open a block takes for ever."""
    trial = Trial(server, tier, "hung store")
    trial.begin()
    with _hung(tier):
        trial.first_round(2)
        ask(server, new_prompt())
    trial.heal()
    return trial.score


@contextlib.contextmanager
def _hung(tier: Tier) -> Iterator[None]:
    if tier.name == "foreword":
        (tier.switches / "hang").touch()
        yield
        (tier.switches / "hang").unlink()
        return
    pipes = tier.files()
    for path in pipes:
        path.unlink()
        os.mkfifo(path)
    yield
    for path in pipes:  # who waits for it goes on: nothing is in there
        for _ in range(100):
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            time.sleep(0.001)
        path.unlink(missing_ok=True)


# A file system of a few MiB at $0, in a namespace that goes with the server.
_SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
_MOUNT = 'mount -t tmpfs -o size=16m none "$0" && mkdir "$0/kv" && exec "$@"'


def can_mount() -> bool:
    """Whether this system lets us have a small file system of our own."""
    with contextlib.suppress(OSError):
        command = [*_SMALL_DISK, 'mount -t tmpfs none "$0"', tempfile.gettempdir()]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def try_full(tier: Tier, model: Path, log: Path, vllm: str) -> Score:
    """The disk fills up while vLLM writes, and later has room again."""
    root = tier.folder.parent
    with serving(tier, model, log, (*_SMALL_DISK, _MOUNT, str(root), vllm, "serve")) as server:
        trial = Trial(server, tier, "full disk")
        ballast = tier.folder.parent / "ballast"
        fill(ballast)
        trial.begin()
        trial.first_round()
        trial.round()
        ballast.unlink()
        trial.heal()
    return trial.score


def fill(ballast: Path) -> None:
    """Take what a small file system has left; never a large one, which others use too."""
    disk = os.statvfs(ballast.parent)
    assert disk.f_blocks * disk.f_frsize <= SMALL_DISK_BYTES, "not the small file system"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize)


def try_kill(server: VllmServer, tier: Tier, model: Path, log: Path) -> Score:
    """The server is killed while it writes, and another started on what it left."""
    trial = Trial(server, tier, "killed server")
    trial.begin()
    busy = [threading.Thread(target=_ask_in_vain, args=(server,)) for _ in range(4)]
    for thread in busy:
        thread.start()
    time.sleep(1.0)
    server.stop(signal.SIGKILL)
    for thread in busy:
        thread.join()
    with serving(tier, model, log) as trial.server:
        trial.first_round()
        trial.heal()
    return trial.score


def _ask_in_vain(server: VllmServer) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        while True:
            ask(server, new_prompt())


def score_card(make: Callable[[Path], Tier], model: Path, vllm: str, root: Path) -> Iterator[Score]:
    """All faults of one kind of tier."""
    (root / "full").mkdir(parents=True)
    tier = make(root)
    with serving(tier, model, root / "log") as server:
        if tier.name == "foreword":
            yield try_unverified(server, tier)
        for fault in DAMAGE:
            yield try_damage(server, tier, fault)
        yield try_hang(server, tier)
        yield try_kill(server, tier, model, root / "log-again")
    if can_mount():
        yield try_full(make(root / "full"), model, root / "log-full", vllm)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one object per fault and tier")
    chosen = parser.parse_args(argv)
    vllm = str(Path(sys.executable).with_name("vllm"))
    right = True
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = make_tiny(root / "model", shape={"head_dim": 32})
        for make in (partial(foreword, switched=True), fs):
            for score in score_card(make, model, vllm, root / make(root).name):
                line = json.dumps(asdict(score)) if chosen.json else str(score)
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
                ours = score.tier == "foreword" and score.fault != UNVERIFIED
                right &= not ours or not (score.wrong or score.failed or score.hung)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
