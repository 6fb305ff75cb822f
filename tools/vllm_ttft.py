"""Seconds to the first token of a real vLLM server: cold, from its device, and from our store after
a restart. `make bench-engines ARGS=tools/vllm_ttft.py`

Each prompt is random words. The server is started by `foreword serve --engine vllm`, stopped after
all were asked twice, and started again on the same folder.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from vllm_server import VllmServer, cached_tokens, vllm_server

WORDS = ("river", "sea", "stone", "cloud", "light", "wind", "tree", "bird", "moon", "star")
SOURCES = "vllm:prompt_tokens_cached_by_source_total"


@contextmanager
def server(folder: Path, dtype: str) -> Iterator[VllmServer]:
    serve = (sys.executable, "-m", "foreword.cli.main", "serve", "--engine", "vllm")
    own = (*serve, "--disk", f"4GiB:{folder / 'kv'}", "--host-bytes", "1GiB")
    flags = ("--max-model-len", "4096", "--dtype", dtype, "--block-size", "128")
    with vllm_server(Path(os.environ["ENGINES_SMOLLM2"]), folder / "log", flags, own) as started:
        started.complete("The sea", max_tokens=1)
        yield started


def first_token(server: VllmServer, prompt: str) -> tuple[float, Any]:
    begin = time.perf_counter()
    answer = server.complete(prompt, max_tokens=1)
    return time.perf_counter() - begin, answer


def text(server: VllmServer, prompt: str) -> str:
    return str(server.complete(prompt, max_tokens=16)["choices"][0]["text"])


def measure(num_prompts: int, num_words: int, dtype: str) -> dict[str, Any]:
    """Medians over the prompts, in seconds, of requests for one token; and whether 16 greedy
    tokens are the same from device and disk."""
    draw = random.Random(0)
    prompts = [" ".join(draw.choices(WORDS, k=num_words)) for _ in range(num_prompts)]
    cold, device, disk, texts = [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with server(folder, dtype) as first:
            for prompt in prompts:
                cold.append(first_token(first, prompt))
                device.append(first_token(first, prompt))
                texts.append(text(first, prompt))
            time.sleep(2)  # what is to be written is written
        with server(folder, dtype) as again:
            for prompt in prompts:
                disk.append(first_token(again, prompt))
            same = texts == [text(again, prompt) for prompt in prompts]
            from_disk = again.metric(SOURCES, source="disk")
            loaded = again.metric("foreword_kv_cache_offload_blocks_loaded_total")
    seconds = {
        name: median(took for took, _ in rows)
        for name, rows in (("cold_s", cold), ("device_s", device), ("disk_s", disk))
    }
    return {
        "dtype": dtype,
        "prompt_tokens": cold[0][1]["usage"]["prompt_tokens"],
        "cached_tokens": [cached_tokens(answer) for _, answer in disk],
        "tokens_from_disk": from_disk,
        "tokens_our_store_loaded": 128 * loaded,
        **{name: round(value, 3) for name, value in seconds.items()},
        "cold_over_device": round(seconds["cold_s"] / seconds["device_s"], 1),
        "cold_over_disk": round(seconds["cold_s"] / seconds["disk_s"], 1),
        "texts_as_from_device": same,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--words", type=int, default=3000)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    print(json.dumps(measure(args.prompts, args.words, args.dtype), indent=2))
