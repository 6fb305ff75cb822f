"""`foreword serve` as a process: a real, tiny model, the banner, and both ways to stop."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from foreword.cli.failure import EXIT_CODES
from tiny import make_tiny

START_S = 60.0
# The command in a process that cannot reach another machine, and says so when it tries.
ALONE = """
import sys

def hear(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0] if event.startswith("socket.get") else args[1][0]
        if host not in ("127.0.0.1", "::1", "localhost"):
            print("reached out:", event, args, file=sys.stderr)
            raise OSError("no network")

sys.addaudithook(hear)
from foreword.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def process(folder: Path, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    with started(folder, tmp_path) as process:
        yield process


@contextmanager
def started(folder: Path, tmp_path: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    flags = ["--model", str(folder), "--name", "tiny", "--port", "0", "--kv-bytes", "4MiB", *more]
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", ALONE, "serve", *flags, "--exact", "off"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={"FOREWORD_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ":".join(sys.path)},
        ) as process,
    ):
        yield process
        process.kill()


def banner(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What it prints until it serves, and its URL."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("    -d "):
            break
    text = "".join(lines)
    match = re.search(r"http://127\.0\.0\.1:\d+", text)
    assert match, text
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        try:
            httpx.get(f"{match[0]}/health", trust_env=False).raise_for_status()
        except httpx.ConnectError:
            time.sleep(0.02)
        else:
            return text, match[0]
    raise AssertionError("it never listened")


@contextmanager
def open_stream(url: str, max_tokens: int) -> Iterator[httpx.Response]:
    body = {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        yield response


def test_a_running_answer_is_finished_after_sigterm(
    process: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    text, url = banner(process)
    for fact in ("model", "context", "KV pool", "exact"):
        assert re.search(rf"^  {fact} +\S", text, re.MULTILINE), text
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] <= 3
    with open_stream(url, 200) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines)[6:])["choices"]
        process.send_signal(signal.SIGTERM)
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert process.wait(20) == 0
    assert "tokens reused" in (tmp_path / "stderr").read_text()
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    assert "reached out" not in (tmp_path / "stderr").read_text()


def test_a_process_that_reaches_out_would_be_seen(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "serve", "--port", "0", "--model", "org/name"],
        capture_output=True,
        check=False,
        text=True,
        env={"HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == EXIT_CODES["model"]
    assert "reached out" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("foreword serve: org/name is not in the hub's cache on this machine")


def test_all_that_a_server_says_can_be_json(folder: Path, tmp_path: Path) -> None:
    with started(folder, tmp_path, "--json") as process:
        deadline_s = time.monotonic() + START_S
        said = tmp_path / "stderr"
        while '"facts"' not in said.read_text():
            assert time.monotonic() < deadline_s
            assert process.poll() is None, said.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""
    lines = [json.loads(line) for line in said.read_text().splitlines()]
    (facts,) = [line["facts"] for line in lines if "facts" in line]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", facts["URL"])
    assert facts["model"] == "tiny, bfloat16 on cpu"
    assert {"context", "KV pool", "reuse", "exact"} <= set(facts)
    assert {line["level"] for line in lines} == {"info"}
    assert any("Stopping" in line["message"] for line in lines)


def test_the_second_ctrl_c_stops_at_once(process: "subprocess.Popen[str]") -> None:
    _, url = banner(process)
    with open_stream(url, 900) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert "Stopping" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 128 + signal.SIGINT
        lines.close()
