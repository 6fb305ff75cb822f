"""What a CUDA machine's tiers give: `make gpu-check`. Under five minutes, prints JSON.

Three questions: how near to a plain copy of pinned memory are blocks that leave and enter the
device; how long is the time to the first token when a prompt comes from host memory and from disk,
beside computing it, for a model in the shape of Llama 3.2 1B with random weights; and is the answer
the same each time. On other devices it runs too, for who wants to see it run.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import foreword.engine  # noqa: F401 - says how OpenMP waits
from foreword.cli.measure import Reply, ask, random_tokens
from foreword.core.request import SamplingParams
from foreword.engine.engine import TorchEngine
from foreword.engine.settings import BLOCK_SIZE, EngineSettings
from foreword.engine.staging import Staging
from foreword.store.codec import kv_offset

LIMIT_S = 270.0  # no new length is begun after it
COPY_BYTES = 256 << 20
ROUNDS, REPEATS = 5, 40
SAMPLING = SamplingParams(4, temperature=0.0, ignore_eos=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print(json.dumps({"skipped": "this machine has no CUDA device that torch can use"}))
        return 0
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="foreword-gpu-") as folder:
        make_model(Path(folder, "model"), args)
        result = asyncio.run(measure(args, Path(folder), begin_s))
    print(json.dumps(result, indent=2))
    return 0 if result["same_answers"] else 1


def make_model(folder: Path, args: argparse.Namespace) -> None:
    """Llama 3.2 1B's shape, with a small vocabulary of made-up words."""
    words = {f"w{i}": i for i in range(1024)}
    words_only = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_only)  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2 * max(args.lengths),
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        with torch.device(args.device):
            model = LlamaForCausalLM(config).bfloat16()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


async def measure(args: argparse.Namespace, folder: Path, begin_s: float) -> dict[str, Any]:
    longest = max(args.lengths)
    plain = EngineSettings(
        str(folder / "model"), device=args.device, max_model_len=longest + 128, kv_bytes=1 << 28
    )
    engine = TorchEngine.load(plain)
    block_bytes = engine.model.block_bytes(BLOCK_SIZE)
    result: dict[str, Any] = {
        "device": _name(args.device),
        "torch": torch.__version__,
        "exact": engine.exact,
        "reason": engine.exact_reason,
        "bandwidth": bandwidth(engine, args.device),
        "ttft": [],
    }
    del engine
    room = (longest // BLOCK_SIZE + 8) * block_bytes
    settings = replace(
        plain,
        kv_bytes=room,
        host_bytes=4 * room,
        disk_bytes=4 * room,
        disk_folder=folder / "kv",
    )
    rows: list[dict[str, Any]] = []
    prompts: dict[int, list[int]] = {}
    async with Serving(settings) as engine:
        await ask(engine, random_tokens(0, 64, engine), SAMPLING)
        for length in sorted(args.lengths):
            if time.monotonic() - begin_s > LIMIT_S / 2:
                break
            prompts[length] = random_tokens(length, length, engine)
            rows.append(await from_host(engine, prompts[length]))
    async with Serving(replace(settings, host_bytes=0)) as engine:
        await ask(engine, random_tokens(1, 64, engine), SAMPLING)
        for row in rows:
            if time.monotonic() - begin_s < LIMIT_S:
                reply = await ask(engine, prompts[row["tokens"]], SAMPLING)
                row |= _seen("disk", reply, row["answer"])
    result["ttft"] = rows
    result["same_answers"] = all(row[k] for row in rows for k in row if k.endswith("_same"))
    result["seconds"] = time.monotonic() - begin_s
    return result


class Serving:
    """An engine that runs as long as the context."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = TorchEngine.load(settings)

    async def __aenter__(self) -> TorchEngine:
        self._engine.start()
        return self._engine

    async def __aexit__(self, *error: object) -> None:
        await self._engine.stop(5.0)


async def from_host(engine: TorchEngine, prompt: list[int]) -> dict[str, Any]:
    """Cold, from the device, and from host memory after something else took the device."""
    cold = await ask(engine, prompt, SAMPLING)
    row: dict[str, Any] = {"tokens": len(prompt), "answer": cold.token_ids, "cold_s": cold.ttft_s}
    row |= _seen("device", await ask(engine, prompt, SAMPLING), cold.token_ids)
    others = engine.cache.pool.num_blocks * BLOCK_SIZE - 1
    await ask(engine, random_tokens(7, others, engine), SamplingParams(1), salt="others")
    await asyncio.sleep(0.5)  # what is being written is not ready
    row |= _seen("host", await ask(engine, prompt, SAMPLING), cold.token_ids)
    return row


def _seen(place: str, reply: Reply, expected: list[int]) -> dict[str, Any]:
    return {
        f"{place}_s": reply.ttft_s,
        f"{place}_tokens": reply.num_cached_tokens,
        f"{place}_same": reply.token_ids == expected,
    }


def bandwidth(engine: TorchEngine, device: str) -> dict[str, float]:
    """GB/s of blocks that leave and enter the device, through staging, beside a plain copy of as
    many bytes of pinned memory. Medians of interleaved rounds."""
    kv, pinned = engine.runner.kv, device.startswith("cuda")
    staging = Staging(kv, COPY_BYTES)
    num_bytes = staging.cell_blocks * staging.record_bytes
    block_ids = list(range(staging.cell_blocks))
    flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    rows = staging.rows(0, len(block_ids))
    kv_start = kv_offset(kv.block_size)
    slots = staging.slots(0, len(block_ids))
    records = [slot[kv_start : staging.record_bytes] for slot in slots]
    copies: dict[str, Callable[[], object]] = {
        "out": partial(kv.read_blocks, block_ids, rows),
        "in": partial(kv.write_blocks, block_ids, records),
        "plain_out": partial(flat.copy_, there),
        "plain_in": partial(there.copy_, flat),
    }
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    for _ in range(ROUNDS + 1):
        for name, copy in copies.items():
            begin_s = time.perf_counter()
            for _ in range(REPEATS):
                copy()
            if pinned:
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin_s)
    moved = REPEATS * num_bytes / 1e9
    return {f"{name}_gb_per_s": moved / statistics.median(s[1:]) for name, s in seconds.items()}


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


if __name__ == "__main__":
    sys.exit(main())
