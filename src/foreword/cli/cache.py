"""`foreword cache stats` and `foreword cache clear`: the cache of a running server. `foreword cache
path`: where on disk this machine's is."""

import argparse
import json
import os
from typing import Any

from foreword.cli.client import Client
from foreword.cli.failure import Failure
from foreword.store.files import kv_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    if parser.get_default("command") != "cache path":
        parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")


def run(args: argparse.Namespace) -> dict[str, Any] | int:
    """The API key of a server that asks for one is taken from OPENAI_API_KEY. Raises Failure where
    the server is not there, or will not clear because requests run."""
    if args.command == "cache path":
        print(kv_folder())
        return 0
    client = Client(args.url, os.environ.get("OPENAI_API_KEY"))
    try:
        if args.command == "cache clear":
            return dict(json.loads(client.read("POST", "/cache/clear")))
        found = client.metrics()
        if "foreword_prefix_cache_queries_total" not in found:
            raise Failure(f"the server at {args.url} is not Foreword's", "failed")
        return stats(found)
    except OSError as error:
        raise Failure(f"no server answers at {args.url}: {error}", "failed") from error


def stats(metrics: dict[str, float]) -> dict[str, Any]:
    """What they say of the cache, since the server's start. Rates are None before the first
    request."""
    found = {name.removeprefix("foreword_"): value for name, value in metrics.items()}
    num_hit = found["prefix_cache_hit_tokens_total"]
    num_prompt = num_hit + found["prefix_cache_miss_tokens_total"]
    num_queries, num_answers = found["prefix_cache_queries_total"], found["ttft_seconds_count"]
    return {
        "requests": int(num_queries),
        "requests_that_reused": int(found["prefix_cache_hits_total"]),
        "prompt_tokens": int(num_prompt),
        "prompt_tokens_reused": int(num_hit),
        "reused_from": {
            name.split(".")[1]: int(value)
            for name, value in found.items()
            if name.startswith("prefix_cache_hit_tokens_total.")
        },
        "share_reused": num_hit / num_prompt if num_prompt else None,
        "ttft_mean_s": found["ttft_seconds_sum"] / num_answers if num_answers else None,
        "cached_bytes": int(found["kv_cache_gpu_usage_bytes"]),
        "leased_bytes": int(found["kv_cache_gpu_leased_bytes"]),
        "host_bytes": int(found["kv_cache_cpu_usage_bytes"]),
        "disk_bytes": int(found["kv_cache_disk_usage_bytes"]),
        "lost_blocks": int(found["kv_cache_offload_blocks_lost_total"]),
        "evicted_blocks": int(found["kv_cache_eviction_count_total"]),
        "running_sequences": int(found["running_sequences"]),
        "waiting_sequences": int(found["queue_depth"]),
    }
