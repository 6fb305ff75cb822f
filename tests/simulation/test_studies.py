"""Each study runs by its one command, and its table is checked in beside it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "bench" / "studies"
SCRIPTS = sorted(path for path in STUDIES.glob("*.py") if path.stem != "study")
WITH_TRACE = ("curve", "global_cache", "tail_lru", "think_times")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Chats of three turns, in Mooncake's form and as sessions of coding agents."""
    folder = tmp_path_factory.mktemp("traces")
    chats, sessions = [], []
    for number in range(30):
        ids, requests = [1, 2], []
        for turn in range(3):
            ids = [*ids, 100 + 10 * number + turn]
            chats.append({"timestamp": 1000 * (number + 10 * turn), "hash_ids": ids})
            chats[-1] |= {"input_length": 512 * len(ids), "output_length": 100}
            requests.append({"t": 20.0 * turn, "model": "m", "hash_ids": ids, "out": 9})
            requests[-1] |= {"in": 512 * len(ids)}
        sessions.append({"id": f"s{number}", "block_size": 512, "requests": requests})
    found = {}
    for name, lines in (("chats", chats), ("sessions", sessions)):
        found[name] = folder / f"{name}.jsonl"
        found[name].write_text("\n".join(json.dumps(line) for line in lines))
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_study_runs_on_little_input(script: Path, traces: dict[str, Path]) -> None:
    words = [sys.executable, "-W", "error", str(script), "--quick"]
    if script.stem in WITH_TRACE:
        words += ["--trace", str(traces["sessions" if script.stem == "think_times" else "chats"])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    checked_in = script.with_suffix(".md").read_text()
    for page in (done.stdout, checked_in):
        for words_of_it in (f"`python bench/studies/{script.name}", "Run:", "Modelled", "ublished"):
            assert words_of_it in page
    # The same tables, of more.
    heads = [
        re.findall(r"^\| [^|]*[a-z][^|]* \|", page, re.M)[0] for page in (done.stdout, checked_in)
    ]
    assert heads[0] == heads[1]


@pytest.mark.parametrize("name", WITH_TRACE)
def test_a_study_without_its_trace_says_so(name: str, tmp_path: Path) -> None:
    words = [sys.executable, str(STUDIES / f"{name}.py"), "--trace", str(tmp_path / "none")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "is not there: name a trace with --trace" in done.stderr
