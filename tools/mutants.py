"""Break the core one small way at a time, and see whether the fast tests notice.

The mutants are all that `mutations.py` makes of the files, so nobody chooses them. Each runs in a
fork of one warm process, which imports the mutated module in place of the real one; the working
tree is only read. Tests run quickest first and stop at the first failure. One that takes five
times its usual CPU seconds has noticed too.

`mutants_equivalent.toml` lists the survivors that change no answer, each with its reason. A
survivor that is not listed fails the run, and so does a listed one that no longer survives.
"""

import argparse
import ast
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

import hypothesis.stateful  # noqa: F401  (warm: each fork needs it)
import pytest

from mutations import Mutant, mutants_of

ROOT = Path(__file__).parent.parent
EQUIVALENT = ROOT / "tools" / "mutants_equivalent.toml"
FILES = (
    "core/block.py",
    "core/pool.py",
    "core/index.py",
    "core/policy.py",
    "core/policies/runs.py",
    "core/leaves.py",
    "core/tier.py",
    "core/reuse.py",
    "core/place.py",
    "core/lower.py",
    "core/cache.py",
)
TEST_FOLDERS = ("unit", "property", "stateful", "simulation", "conformance")
SCORE_MIN = 0.9
NUM_WORKERS = 2
COLLECT_LIMIT_S = 20
TEST_LIMIT_S = 0.5  # added to five times the usual, for tests that take almost nothing
MEMORY_LIMIT_BYTES = 4 << 30


class Broken(MetaPathFinder, Loader):
    """Imports one module from a mutant's code instead of its file."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.name = "foreword." + mutant.file.removesuffix(".py").replace("/", ".")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.mutant.code, module.__dict__)


class Stopwatch:
    """pytest plug-in: quickest tests first, each with its own limit of CPU seconds."""

    def __init__(self, usual_s: dict[str, float]) -> None:
        self.usual_s = usual_s
        self.spent_s: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.usual_s.get(item.nodeid, 0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if item.nodeid in self.usual_s:
            limit_s = 5 * self.usual_s[item.nodeid] + TEST_LIMIT_S
            signal.setitimer(signal.ITIMER_PROF, limit_s)
        started = sum(os.times()[:2])
        result = yield
        self.spent_s[item.nodeid] = sum(os.times()[:2]) - started
        return result


def core_tests(root: Path) -> list[str]:
    """Test files of this project's core alone: what they import decides."""
    found = []
    for folder in TEST_FOLDERS:
        for path in sorted((root / "tests" / folder).rglob("test_*.py")):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
            modules |= {
                a.name for node in nodes if isinstance(node, ast.Import) for a in node.names
            }
            ours = {name for name in modules if name.startswith("foreword")}
            if ours and all(name.startswith("foreword.core") for name in ours):
                found.append(str(path.relative_to(root)))
    return found


def run_tests(tests: list[str], usual_s: dict[str, float], mutant: Mutant | None) -> int:
    """In a fork: pytest's exit code. Without a mutant, times.json gets what each test takes."""
    if mutant is not None:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        signal.setitimer(signal.ITIMER_PROF, COLLECT_LIMIT_S)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        broken = Broken(mutant)
        sys.meta_path.insert(0, broken)
        import_module(broken.name)  # what does not even import is noticed, not misused
    watch = Stopwatch(usual_s)
    options = ["-q", "-x", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    code = int(pytest.main([*options, *tests], plugins=[watch]))
    if mutant is None:
        Path("times.json").write_text(json.dumps(watch.spent_s))
    return code


def fork(tests: list[str], usual_s: dict[str, float], mutant: Mutant | None) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        code = run_tests(tests, usual_s, mutant)
    except BaseException:  # noqa: BLE001  (a mutant may raise anything anywhere)
        code = int(pytest.ExitCode.INTERNAL_ERROR)
    sys.stdout.flush()
    os._exit(code)


def is_caught(status: int) -> bool:
    """From a fork's wait status. A signal is a time-out, or a crash: noticed either way."""
    code = os.waitstatus_to_exitcode(status)
    assert code not in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
    return code != 0


def survivors(mutants: list[Mutant], tests: list[str]) -> list[Mutant]:
    """Run all; those that no test noticed, in the order given."""
    for _warm in range(2):  # the first run compiles the tests
        if os.waitpid(fork(tests, {}, None), 0)[1]:
            sys.exit("the tests fail without any mutant")
    usual_s = json.loads(Path("times.json").read_text())
    print(
        f"{len(mutants)} mutants, {len(usual_s)} tests of {sum(usual_s.values()):.1f} CPU seconds"
    )
    running: dict[int, Mutant] = {}
    alive: list[Mutant] = []
    for mutant in [*mutants, *[None] * NUM_WORKERS]:
        if running and (mutant is None or len(running) == NUM_WORKERS):
            pid, status = os.wait()
            done = running.pop(pid)
            if not is_caught(status):
                alive.append(done)
                print(f"survived: {done.file} {done.function}: {done.mutation}", flush=True)
        if mutant is not None:
            running[fork(tests, usual_s, mutant)] = mutant
    return [mutant for mutant in mutants if mutant in alive]


def report(mutants: list[Mutant], alive: list[Mutant], full: bool) -> bool:
    """Print the score. True: good enough, and every survivor is explained."""
    for file in sorted({mutant.file for mutant in mutants}):
        num_all = sum(mutant.file == file for mutant in mutants)
        num_alive = sum(mutant.file == file for mutant in alive)
        print(f"{file}: {num_all - num_alive} of {num_all} caught")
    score = 1 - len(alive) / len(mutants)
    reasons = {
        (entry["file"], entry["function"], entry["mutation"]): entry["reason"]
        for entry in tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    }
    unlisted = [mutant for mutant in alive if mutant.key not in reasons]
    stale = set(reasons) - {mutant.key for mutant in alive} if full else set()
    for mutant in alive:
        if mutant.key in reasons:
            print(f"{mutant.file} {mutant.function}: {mutant.mutation}\n    {reasons[mutant.key]}")
    for mutant in unlisted:
        print("not noticed, not listed: {}  {}\n    {}".format(*mutant.key))
    for key in sorted(stale):
        print("listed, but does not survive: {}  {}\n    {}".format(*key))
    print(f"score: {score:.1%} of {len(mutants)} mutants caught; {len(unlisted)} unexplained")
    return score >= SCORE_MIN and not unlisted and not stale


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=FILES, help="below src/foreword")
    parser.add_argument("--sample", type=int, help="try only that many, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # A copy, so that edits made meanwhile change nothing.
        tree = Path(folder)
        ignore = shutil.ignore_patterns("__pycache__")
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", tree)
        os.chdir(tree)
        sys.path.insert(0, str(tree / "src"))
        os.environ["HYPOTHESIS_PROFILE"] = "mutants"
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and each costs time
        package = tree / "src" / "foreword"
        mutants = [m for file in args.files for m in mutants_of(file, (package / file).read_text())]
        if args.sample is not None:
            mutants = random.Random(args.seed).sample(mutants, min(args.sample, len(mutants)))
        alive = survivors(mutants, core_tests(tree))
        full = args.sample is None and tuple(args.files) == FILES
        return 0 if report(mutants, alive, full) else 1


if __name__ == "__main__":
    sys.exit(main())
