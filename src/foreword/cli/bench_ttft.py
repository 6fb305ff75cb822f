"""`foreword bench ttft`: the time to the first token, cold and from the device, through HTTP.

A server is started on a free port. Prompts are token ids, so lengths are exact. Cold prompts have
a prefix that was never seen; warm ones repeat it with a new tail; "anywhere" ones end inside a
block of the known prefix, then add a new tail.
"""

import argparse
import random
import statistics
import time
from typing import Any

from foreword.cli.client import Client, server
from foreword.cli.settings import count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder")
    parser.add_argument("--threads", type=count, default=2, help="torch threads of the server")
    parser.add_argument("--prefix", type=count, default=3000, help="tokens")
    parser.add_argument("--tail", type=count, default=16, help="new tokens after the prefix")
    parser.add_argument("--rounds", type=count, default=7, help="cold prefixes; each gets 2 warm")
    parser.add_argument("--exact", choices=["auto", "off"], default="auto")


def first_token(client: Client, model: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first streamed token, and how many prompt tokens were computed."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    begin_s = time.perf_counter()
    ttft_s, usage = 0.0, None
    for event in client.events("/v1/completions", body):
        ttft_s = ttft_s or time.perf_counter() - begin_s
        usage = event.get("usage") or usage
    assert usage is not None
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return ttft_s, usage["prompt_tokens"] - cached


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Keys: `cold_s`, `device_s`, `anywhere_s` (medians), `ratio`, `computed_tokens` (the most
    that any warm prompt computed; the tail is all that is new)."""
    draw = random.Random(time.time_ns())
    ids = range(100, 400)  # ordinary tokens in every model this serves

    def tokens(count: int) -> list[int]:
        return draw.choices(ids, k=count)

    cold, warm, anywhere = [], [], []
    flags = ["--model", args.model, "--threads", str(args.threads), "--exact", args.exact]
    flags += ["--disk", "0"]
    with server(*flags) as (client, model):
        first_token(client, model, tokens(args.prefix))
        for i in range(args.rounds):
            prefix = tokens(args.prefix)
            cold.append(first_token(client, model, prefix + tokens(args.tail)))
            # A new tail starts with a token that no earlier tail had there: none is shared.
            warm += [
                first_token(client, model, [*prefix, 500 + k, *tokens(args.tail - 1)])
                for k in range(2)
            ]
            cut = args.prefix - 37 * (i + 1)
            anywhere.append(
                first_token(client, model, [*prefix[:cut], 510, *tokens(args.tail - 1)])
            )
    cold_s = statistics.median(ttft_s for ttft_s, _ in cold)
    device_s = statistics.median(ttft_s for ttft_s, _ in warm)
    return {
        "cold_s": cold_s,
        "device_s": device_s,
        "anywhere_s": statistics.median(ttft_s for ttft_s, _ in anywhere),
        "ratio": cold_s / device_s,
        "computed_tokens": max(computed for _, computed in warm + anywhere),
        "cold_computed_tokens": statistics.median(computed for _, computed in cold),
        "prefix_tokens": args.prefix,
        "tail_tokens": args.tail,
        "rounds": args.rounds,
    }
