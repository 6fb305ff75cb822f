"""`foreword bench ttft`: the time to the first token, through HTTP: cold, from the device, from
host memory and, after a restart, from disk.

Servers are started on free ports. Prompts are token ids, so lengths are exact. Cold prompts have a
prefix that was never seen; warm ones repeat it with a new tail; "anywhere" ones end inside a block
of the known prefix, then add a new tail. For host and disk the device has room for one prompt, so
each one evicts the one before; the disk's are asked after all were computed and the process began
anew, and are read past the file cache.
"""

import argparse
import random
import statistics
import tempfile
import time
from typing import Any

from foreword.cli.client import Client, server
from foreword.cli.settings import count

FLUSH_S = 1.0  # for the tiers to write what was computed last


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder")
    parser.add_argument("--threads", type=count, default=2, help="torch threads of the server")
    parser.add_argument("--prefix", type=count, default=3000, help="tokens")
    parser.add_argument("--tail", type=count, default=16, help="new tokens after the prefix")
    parser.add_argument("--rounds", type=count, default=7, help="cold prefixes; each gets 2 warm")
    parser.add_argument("--exact", choices=["auto", "off"], default="auto")


class Answer:
    """One streamed answer of two tokens: seconds to the first, tokens computed, the text."""

    def __init__(self, client: Client, model: str, prompt: list[int]) -> None:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 2,
            "temperature": 0,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        begin_s = time.perf_counter()
        self.ttft_s, self.text, usage = 0.0, "", None
        for event in client.events("/v1/completions", body):
            self.ttft_s = self.ttft_s or time.perf_counter() - begin_s
            self.text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
        assert usage is not None
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.num_computed = usage["prompt_tokens"] - cached


class Prompts:
    """Prefixes that nobody saw before. `warm` is such a prefix with a tail of its own: it starts
    with a token that no earlier tail had there, so none is shared."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._draw = random.Random(time.time_ns())
        self._args = args

    def tokens(self, num_tokens: int) -> list[int]:
        return self._draw.choices(range(100, 400), k=num_tokens)  # ordinary ones in every model

    def prefix(self) -> list[int]:
        return self.tokens(self._args.prefix)

    def warm(self, prefix: list[int], number: int) -> list[int]:
        return [*prefix, 500 + number, *self.tokens(self._args.tail - 1)]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Keys: `cold_s`, `device_s`, `anywhere_s`, `host_s`, `disk_s` (medians), `ratio` and those of
    host and disk (cold over each), `computed_tokens` (the most that any warm prompt computed; the
    tail is all that is new), `ok`: host and disk gave the texts that came without a cache."""
    prompts = Prompts(args)
    flags = ["--model", args.model, "--threads", str(args.threads), "--exact", args.exact]
    result = _device(args, prompts, flags)
    result |= _below(args, prompts, flags)
    for tier in ("host", "disk"):
        result[f"{tier}_ratio"] = result["cold_s"] / result[f"{tier}_s"]
    return result


def _device(args: argparse.Namespace, prompts: Prompts, flags: list[str]) -> dict[str, Any]:
    cold, warm, anywhere = [], [], []
    with server(*flags, "--disk", "0") as (client, model):
        Answer(client, model, prompts.prefix())
        for i in range(args.rounds):
            prefix = prompts.prefix()
            cold.append(Answer(client, model, prompts.warm(prefix, 9)))
            warm += [Answer(client, model, prompts.warm(prefix, k)) for k in range(2)]
            cut = prefix[: args.prefix - 37 * (i + 1)]
            anywhere.append(Answer(client, model, prompts.warm(cut, 10)))
    cold_s, device_s = _median_s(cold), _median_s(warm)
    return {
        "cold_s": cold_s,
        "device_s": device_s,
        "anywhere_s": _median_s(anywhere),
        "ratio": cold_s / device_s,
        "computed_tokens": max(answer.num_computed for answer in warm + anywhere),
        "cold_computed_tokens": statistics.median(answer.num_computed for answer in cold),
        "prefix_tokens": args.prefix,
        "tail_tokens": args.tail,
        "rounds": args.rounds,
    }


def _below(args: argparse.Namespace, prompts: Prompts, flags: list[str]) -> dict[str, Any]:
    room = ["--kv-bytes", str(_kv_bytes(args, prompts, flags))]
    prefixes = [prompts.prefix() for _ in range(args.rounds)]
    asked = [prompts.warm(prefix, 1) for prefix in prefixes]
    with server(*flags, "--policy", "reuse=off") as (client, model):
        truth = [Answer(client, model, prompt).text for prompt in asked]
    with tempfile.TemporaryDirectory(prefix="foreword-bench-") as folder:
        room += ["--disk", f"4GiB:{folder}"]
        with server(*flags, *room, "--host-bytes", "4GiB") as (client, model):
            for prefix in prefixes:
                Answer(client, model, prompts.warm(prefix, 0))
            time.sleep(FLUSH_S)
            host = [Answer(client, model, prompt) for prompt in asked]
        with server(*flags, *room) as (client, model):
            Answer(client, model, prompts.prefix())  # the first of a process is slow
            disk = [Answer(client, model, prompt) for prompt in asked]
    return {
        "host_s": _median_s(host),
        "disk_s": _median_s(disk),
        "host_computed_tokens": max(answer.num_computed for answer in host),
        "disk_computed_tokens": max(answer.num_computed for answer in disk),
        "ok": [answer.text for answer in host] == truth == [answer.text for answer in disk],
    }


def _kv_bytes(args: argparse.Namespace, prompts: Prompts, flags: list[str]) -> int:
    """Device memory for little more than one prompt."""
    with server(*flags, "--disk", "0") as (client, model):
        Answer(client, model, prompts.warm(prompts.prefix(), 0))
        return int(client.metrics()["foreword_kv_cache_gpu_usage_bytes"] * 1.05)


def _median_s(answers: list[Answer]) -> float:
    return statistics.median(answer.ttft_s for answer in answers)
