"""A real vLLM server on this machine's CPU, for the time of a `with`, and what to ask it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_S = 300.0  # 15 s on a quiet machine, most of them imports
STOP_S = 30.0
LOG_SHOWN = 6000  # characters of its end, in the message of a failure

# No network, no statistics, a KV cache that the override below makes small.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "NO_PROXY": "127.0.0.1",
}
# Eager: compiling takes more than a minute. float32: answers do not depend on how a prompt was cut.
FLAGS = ("--enforce-eager", "--dtype", "float32", "--host", "127.0.0.1")
FLAGS += ("--block-size", "32", "--enable-prompt-tokens-details")
FLAGS += ("--prefix-caching-hash-algo", "sha256_cbor")
# For a model of tests/tiny.py: so few and small blocks, 768 tokens, that two prompts do not fit.
TINY_FLAGS = ("--max-model-len", "512", "--num-gpu-blocks-override", "24")


@dataclass
class VllmServer:
    """One running server. `process` leads a process group of its own."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def complete(self, prompt: str | Sequence[int], max_tokens: int = 8, **body: Any) -> Any:
        """The greedy answer to a prompt or token ids, as /v1/completions gives it."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | body
        return self.ask("/v1/completions", {"model": "model"} | body)

    def ask(self, path: str, body: Any = None) -> Any:
        """POST a JSON body, or GET without one; what comes back as JSON, else as text."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error
        except OSError as error:
            raise AssertionError(f"{path}: {error}\n{self.end_of_log()}") from error
        return json.loads(text) if text[:1] in ("{", "[") else text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values over the lines that have these labels."""
        lines = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", self.ask("/metrics"), re.M)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for shown, value in lines if all(w in shown for w in wanted))

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signal the whole process group and wait for its end, which comes in any case."""
        queues = self._queues()
        for signal_number in (number, signal.SIGKILL):  # the second for what is left of the group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        for queue in queues:
            queue.unlink(missing_ok=True)

    def _queues(self) -> set[Path]:
        """Shared memory of the queues between its processes, which Python leaves behind when all of
        them are killed."""
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(process.name)) == self.process.pid:
                    maps = (process / "maps").read_text()
                    found |= set(
                        map(Path, re.findall(r"/dev/shm/(?:psm_|sem\.mp-)\w+$", maps, re.M))
                    )
        return found

    def regions(self) -> list[Path]:
        """What it ever had in shared memory for its tiers, by its log, and still has a name."""
        names = re.findall(r"/dev/shm/vllm_offload_[\w-]+\.mmap", self.log.read_text())
        return [path for path in map(Path, sorted(set(names))) if path.exists()]

    def end_of_log(self) -> str:
        return f"the end of {self.log}:\n{self.log.read_text(errors='replace')[-LOG_SHOWN:]}"


def cached_tokens(answer: Any) -> int:
    """How many of the prompt's tokens were not computed."""
    details = answer["usage"]["prompt_tokens_details"]
    return (details or {}).get("cached_tokens") or 0


@contextlib.contextmanager
def vllm_server(
    model: Path, log: Path, flags: Sequence[str], command: Sequence[str] = (), **variables: str
) -> Iterator[VllmServer]:
    """A server of a model folder. `flags` go after FLAGS, `variables` into its environment;
    `command` replaces `vllm serve`. Raises AssertionError with the end of its log when it does not
    get ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = command or (str(Path(sys.executable).with_name("vllm")), "serve")
    words = [*command, str(model), "--served-model-name", "model", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, *FLAGS, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **ENVIRONMENT, **variables},
        )
    server = VllmServer(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        server.stop()
        for region in server.regions():
            region.unlink()


def _wait_until_ready(server: VllmServer) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"vLLM ended by itself; {server.end_of_log()}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
            return
        time.sleep(0.25)
    raise AssertionError(f"vLLM is not ready after {READY_S:.0f} s; {server.end_of_log()}")
