"""`foreword bench soak`: minutes of load on a server whose every tier is too small for it.

Streams ask about documents that are three times what the device holds, twice what the host tier
holds and more than the disk tier holds. Memory must stay flat, each budget must hold, what was
reused must add up to what was not computed, and the same prompt must have the same answer always
(in exact mode, which the answer of the server's start says).
"""

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foreword.cli.bench_load import RESIDENT
from foreword.cli.bench_ttft import Answer
from foreword.cli.client import Client, server
from foreword.cli.settings import count

TOKENS = range(100, 400)  # ordinary ones in every model this serves
SAMPLE_S = 2.0
NUM_TAILS = 3  # questions about each document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder")
    parser.add_argument("--threads", type=count, default=2, help="torch threads of the server")
    parser.add_argument("--exact", choices=["auto", "off"], default="auto")
    parser.add_argument("--minutes", type=count, default=15)
    parser.add_argument("--streams", type=count, default=4, help="at once")
    parser.add_argument("--device-tokens", type=count, default=3000, help="room on the device")
    parser.add_argument("--document", type=count, default=600, help="tokens of one")


class Load:
    """What the streams share: documents, sums, the first answer to each question."""

    def __init__(self, client: Client, model: str, args: argparse.Namespace) -> None:
        self._draw = random.Random(1)
        self._ask = (client, model)
        size = args.document
        self._documents = [
            self._draw.choices(TOKENS, k=size) for _ in range(3 * args.device_tokens // size)
        ]
        self._lock = threading.Lock()
        self._until_s = time.monotonic() + 60 * args.minutes
        self._first: dict[tuple[int, int], str] = {}
        self.num_prompt = self.num_computed = self.num_different = self.num_requests = 0
        self.ttft_s: list[float] = []
        self.errors: list[str] = []

    def stream(self) -> None:
        """Ask one question after the other until the time is over."""
        while time.monotonic() < self._until_s:
            with self._lock:
                question = self._draw.randrange(len(self._documents)), self._draw.randrange(9)
            document, tail = self._documents[question[0]], question[1] % NUM_TAILS
            prompt = [*document, 500 + tail, *range(200, 215)]
            try:
                answer = Answer(*self._ask, prompt)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted and shown
                self.errors.append(f"{type(error).__name__}: {error}")
                continue
            with self._lock:
                self.num_requests += 1
                self.num_prompt += len(prompt)
                self.num_computed += answer.num_computed
                self.ttft_s.append(answer.ttft_s)
                first = self._first.setdefault((question[0], tail), answer.text)
                self.num_different += first != answer.text


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Keys: `requests`, `errors`, `different_answers`; `tokens`: of all prompts, computed, and
    reused by tier; `peak_bytes` and `budget_bytes` by tier; `memory_bytes` of the server after a
    tenth of the time and at the end (medians of the samples there); `evicted_blocks`, `ttft_s`;
    `ok`: all of it as it should be, memory within 5 %."""
    flags = ["--model", args.model, "--threads", str(args.threads), "--exact", args.exact]
    per_token = _bytes_per_token(flags)
    room = args.device_tokens * per_token
    budgets = {"device": room, "host": room * 3 // 2, "disk": room * 5 // 2}
    with tempfile.TemporaryDirectory(prefix="foreword-bench-") as folder:
        flags += ["--kv-bytes", str(budgets["device"]), "--host-bytes", str(budgets["host"])]
        flags += ["--disk", f"{budgets['disk']}:{folder}"]
        with server(*flags) as (client, model):
            load = Load(client, model, args)
            with sampling(client, Path(folder)) as samples:
                threads = [threading.Thread(target=load.stream) for _ in range(args.streams)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            found = client.metrics()
    return _report(load, samples, found, budgets)


def _report(
    load: Load,
    samples: list[dict[str, float]],
    found: dict[str, float],
    budgets: dict[str, int],
) -> dict[str, Any]:
    hits = "foreword_prefix_cache_hit_tokens_total"
    reused = {name: int(found.get(f"{hits}.{name}", 0)) for name in budgets}
    tenth = max(1, len(samples) // 10)
    memory = {
        "tenth": statistics.median(s["memory"] for s in samples[tenth : 2 * tenth]),
        "end": statistics.median(s["memory"] for s in samples[-tenth:]),
    }
    peaks = {name: max(sample[name] for sample in samples) for name in budgets}
    computed = int(found["foreword_prefix_cache_miss_tokens_total"])
    return {
        "requests": load.num_requests,
        "errors": load.errors,
        "different_answers": load.num_different,
        "tokens": {"prompts": load.num_prompt, "computed": load.num_computed, "reused": reused},
        "peak_bytes": peaks,
        "budget_bytes": budgets,
        "memory_bytes": memory,
        "evicted_blocks": found["foreword_kv_cache_eviction_count_total"],
        "lost_blocks": {
            name.split(".")[1]: int(number)
            for name, number in found.items()
            if name.startswith("foreword_kv_cache_offload_blocks_lost_total.")
        },
        "ttft_s": statistics.median(load.ttft_s),
        "ok": not load.errors
        and not load.num_different
        and sum(reused.values()) == load.num_prompt - load.num_computed
        and computed == load.num_computed
        and all(peaks[name] <= budgets[name] for name in budgets)
        and memory["end"] <= 1.05 * memory["tenth"],
    }


@contextmanager
def sampling(client: Client, folder: Path) -> Iterator[list[dict[str, float]]]:
    """A list that grows, while the context lasts, by what the server and its disk take."""
    samples: list[dict[str, float]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            found = client.metrics()
            samples.append(
                {
                    "memory": found[RESIDENT],
                    "device": found["foreword_kv_cache_gpu_usage_bytes"],
                    "host": found["foreword_kv_cache_cpu_usage_bytes"],
                    "disk": float(disk_usage(folder)),
                }
            )

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def disk_usage(folder: Path) -> int:
    """Bytes that the files below a folder take of their disk."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(Path(place, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # it went while we looked
    return total


def _bytes_per_token(flags: list[str]) -> int:
    """Of KV: from what the device holds after one prompt."""
    num_tokens = 16 * 40
    with server(*flags, "--disk", "0") as (client, model):
        Answer(client, model, random.Random(0).choices(TOKENS, k=num_tokens - 1))
        return int(client.metrics()["foreword_kv_cache_gpu_usage_bytes"]) // num_tokens
