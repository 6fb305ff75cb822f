"""`foreword bench load`: many streams at once, some of which are left, with the cache and without.

A server is started on a free port for each. Of the prompts, given as token ids, one share begins
with one of a few long openings, the others with nothing that came before. A request that is to be
left is closed before its first token, or after one. All others must end as asked. Afterwards
/metrics must show that nothing is held any more.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from foreword.cli.client import Client, server
from foreword.cli.failure import Failure
from foreword.cli.settings import count, size

TOKENS = range(100, 400)  # ordinary ones in every model this serves
NUM_OPENINGS = 8
LEAVE_S_MAX = 0.05  # in which a client that leaves early does so
SETTLE_S = 30.0  # for the server to notice the last that left
HELD = {
    "leased_bytes": "foreword_kv_cache_gpu_leased_bytes",
    "running": "foreword_running_sequences",
    "waiting": "foreword_queue_depth",
}
RESIDENT = "process_resident_memory_bytes"
OPEN_FILES = "process_open_fds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder")
    parser.add_argument("--threads", type=count, default=2, help="torch threads of the server")
    parser.add_argument("--exact", choices=["auto", "off"], default="auto")
    parser.add_argument("--kv-bytes", type=size, default="256MiB", help="the server's pool")
    parser.add_argument("--requests", type=count, default=200)
    parser.add_argument("--streams", type=count, default=32, help="at once")
    parser.add_argument("--leave", type=percent, default=10, help="%% of requests that are left")
    parser.add_argument("--shared", type=percent, default=50, help="%% with a long opening")
    parser.add_argument("--opening", type=count, default=384, help="tokens of such an opening")
    parser.add_argument("--own", type=count, default=64, help="most tokens of a prompt's own")
    parser.add_argument("--new-tokens", type=count, default=16, help="of each answer")
    parser.add_argument("--seed", type=count, default=1, help="of the prompts and who leaves")


def percent(text: str) -> int:
    """A whole number from 0 to 100."""
    if text.isdecimal() and len(text) <= 3 and int(text) <= 100:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no percentage: 0 to 100")


@dataclass(frozen=True, slots=True)
class Plan:
    """One request: its prompt, and when the client leaves, if it does."""

    prompt: list[int]
    leaves: str = ""  # "early": before the first token; "late": after it


def plans(args: argparse.Namespace) -> list[Plan]:
    draw = random.Random(args.seed)
    openings = [draw.choices(TOKENS, k=args.opening) for _ in range(NUM_OPENINGS)]
    made = []
    for _ in range(args.requests):
        opening = draw.choice(openings) if draw.randrange(100) < args.shared else []
        own = draw.choices(TOKENS, k=draw.randint(1, args.own))
        leaves = draw.choice(("early", "late")) if draw.randrange(100) < args.leave else ""
        made.append(Plan(opening + own, leaves))
    return made


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Keys: `cache` and `no_cache`, each as `_load` says, `ttft_ratio` (their averages, without
    over with), `throughput_ratio` (with over without), and `ok`: no error, and nothing held."""
    flags = ["--model", args.model, "--threads", str(args.threads), "--exact", args.exact]
    flags += ["--kv-bytes", str(args.kv_bytes), "--max-queue", str(max(256, args.streams))]
    flags += ["--disk", "0"]
    result: dict[str, Any] = {"requests": args.requests, "streams": args.streams}
    for name, more in (("cache", []), ("no_cache", ["--policy", "reuse=off"])):
        with server(*flags, *more) as (client, model):
            result[name] = _load(client, model, args)
    on, off = result["cache"], result["no_cache"]
    result["ttft_ratio"] = off["ttft_s"]["average"] / on["ttft_s"]["average"]
    result["throughput_ratio"] = on["requests_per_s"] / off["requests_per_s"]
    faults = [*on["errors"].values(), *off["errors"].values()]
    result["ok"] = not any([*faults, *on["held"].values(), *off["held"].values()])
    return result


def _load(client: Client, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Keys: `errors` (how often each was seen), `left` (clients), `held` (what is at the end that
    should not be), `memory_bytes` of the server after a first request, a tenth and all, throughput,
    and `ttft_s`: seconds from sending to the first token, of those who stayed."""
    warm = Plan(random.Random(0).choices(TOKENS, k=args.opening))
    _ask(client, model, warm, args.new_tokens)
    before = client.metrics()
    memory = {"start": before.get(RESIDENT)}
    todo = plans(args)
    ttft_s: list[float] = []
    errors: dict[str, int] = {}
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(args.streams) as pool:
        asked = [pool.submit(_ask, client, model, plan, args.new_tokens) for plan in todo]
        for number, answer in enumerate(as_completed(asked), start=1):
            try:
                ttft_s += answer.result()
            except (Failure, OSError, HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
                errors[reason] = errors.get(reason, 0) + 1
            if number == max(1, args.requests // 10):
                memory["tenth"] = client.metrics().get(RESIDENT)
    spent_s = time.perf_counter() - begin_s
    after = _settled(client, before)
    memory["end"] = after.get(RESIDENT)
    prompts = sum(len(plan.prompt) for plan in todo)
    hits = after["foreword_prefix_cache_hit_tokens_total"]
    missed = after["foreword_prefix_cache_miss_tokens_total"]
    return {
        "errors": errors,
        "left": sum(bool(plan.leaves) for plan in todo),
        "held": _held(after, before),
        "memory_bytes": memory,
        "requests_per_s": len(todo) / spent_s,
        "prompt_tokens_per_s": prompts / spent_s,
        "new_tokens_per_s": len(ttft_s) * args.new_tokens / spent_s,
        "reused": hits / (hits + missed),
        "preemptions": after["foreword_preemptions_total"],
        "ttft_s": _summary(ttft_s),
    }


def _ask(client: Client, model: str, plan: Plan, num_tokens: int) -> list[float]:
    """Seconds to the first token, in a list; empty for a client that left. Raises Failure where an
    answer is not as asked, and what the connection raises."""
    body = {
        "model": model,
        "prompt": plan.prompt,
        "max_tokens": num_tokens,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    begin_s = time.perf_counter()
    if plan.leaves == "early":
        with client.sent("/v1/completions", body):
            time.sleep(random.Random(len(plan.prompt)).uniform(0, LEAVE_S_MAX))
        return []
    ttft_s: list[float] = []
    num_came = 0
    with closing(client.events("/v1/completions", body)) as events:
        for event in events:
            ttft_s = ttft_s or [time.perf_counter() - begin_s]
            if plan.leaves:
                return []
            if event.get("usage"):
                num_came = event["usage"]["completion_tokens"]
    if num_came != num_tokens:
        raise Failure(f"{num_tokens} tokens were asked for and {num_came} came", "failed")
    return ttft_s


def _settled(client: Client, before: dict[str, float]) -> dict[str, float]:
    """The metrics once nothing is held, or after SETTLE_S."""
    deadline_s = time.monotonic() + SETTLE_S
    while any(_held(now := client.metrics(), before).values()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return now


def _held(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    held = {name: now[metric] for name, metric in HELD.items()}
    if OPEN_FILES in now:  # connections too
        held["open_files"] = max(0.0, now[OPEN_FILES] - before[OPEN_FILES])
    return held


def _summary(seconds: Iterable[float]) -> dict[str, float]:
    values = sorted(seconds)
    if len(values) < 2:
        raise Failure("too few answers came to speak of: see --requests and --leave", "failed")
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {
        "average": statistics.fmean(values),
        "p50": cuts[49],
        "p95": cuts[94],
        "p99": cuts[98],
    }
