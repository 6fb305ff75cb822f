"""`foreword verify --exact`: with reuse and without, the same answers, bit for bit.

Each prompt first runs alone in an engine that reuses nothing. Then the same prompts run in an
engine that knows prefixes of them cut anywhere, in batches mixed with prefill, in a pool so small
that requests are preempted, and once more when everything is known; then in the small pool above
host memory and disk, and in a new engine that finds the disk's. Every step's logits are compared.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foreword.cli.measure import engine_settings
from foreword.core.request import Output, Request, SamplingParams
from foreword.engine.engine import TorchEngine
from foreword.engine.model import DTYPES
from foreword.engine.sample import Sample
from foreword.engine.settings import BLOCK_SIZE, EngineSettings


class RecordingEngine(TorchEngine):
    """Keeps the logits of every token it samples, by request, until taken."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logits: dict[str, list[torch.Tensor]] = {}

    def _sample(self, sequence: Sample, logits: torch.Tensor) -> Output:
        self.logits.setdefault(sequence.request.request_id, []).append(logits.clone())
        return super()._sample(sequence, logits)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Per dtype: whether the engine claims exact mode and why, how many answers and logits
    differed, the largest difference, and what was exercised. `ok`: a dtype claims exact mode, and
    none that does differed."""
    results = {}
    for dtype in DTYPES:
        args.dtype = dtype
        results[dtype] = asyncio.run(compare(args))
    ok = all(result["different_prompts"] == 0 for result in results.values() if result["exact"])
    return {"ok": ok and any(result["exact"] for result in results.values()), "dtypes": results}


async def compare(args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(args.seed)
    sampling = SamplingParams(args.new_tokens, temperature=0.0, ignore_eos=True)
    off = RecordingEngine.load(engine_settings(args, prefix_caching=False))
    prompts = _prompts(draw, args, off.card.vocab_size)
    off.start()
    cold = [await _tokens(off, f"{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    await off.stop(1.0)
    longest = max(len(prompt) for prompt in prompts) + args.new_tokens
    # Room for little more than the longest request: batches of up to eight are preempted.
    num_blocks = -(-longest // BLOCK_SIZE) + 4
    settings = engine_settings(
        args, max_num_seqs=8, kv_bytes=num_blocks * off.model.block_bytes(BLOCK_SIZE)
    )
    roomy = engine_settings(args, max_num_seqs=8)
    with tempfile.TemporaryDirectory(prefix="foreword-verify-") as folder:
        disk = replace(settings, disk_bytes=1 << 32, disk_folder=Path(folder))
        pools = (settings, roomy, replace(disk, host_bytes=1 << 30), disk)
        results = await _warm(pools, prompts, sampling, args, cold, off.logits)
    return {
        "exact": off.exact,
        "reason": off.exact_reason,
        "prompts": len(prompts),
        "logits_compared": sum(result["logits"] for result in results),
        "different_prompts": sum(result["different"] for result in results),
        "different_texts": sum(result["texts"] for result in results),
        "largest_difference": max(result["largest"] for result in results),
        "reused_tokens": sum(result["reused"] for result in results),
        "restored_tokens": sum(result["restored"] for result in results),
        "preemptions": results[0]["preemptions"],
    }


async def _warm(
    pools: Sequence[EngineSettings],
    prompts: list[list[int]],
    sampling: SamplingParams,
    args: argparse.Namespace,
    cold: list[tuple[list[int], int]],
    truth: dict[str, list[torch.Tensor]],
) -> list[dict[str, Any]]:
    draw = random.Random(args.seed + 1)
    results = []
    for pool in pools:
        engine = RecordingEngine.load(pool)
        engine.start()
        result = {"logits": 0, "different": 0, "texts": 0, "largest": 0.0, "reused": 0}
        for start in range(0, len(prompts), 8):
            batch = list(enumerate(prompts))[start : start + 8]
            for i, prompt in batch:
                cut = draw.randint(1, len(prompt))
                await _tokens(engine, f"prefix {i}", prompt[:cut], SamplingParams(1))
            size = draw.randint(2, 8)
            for at in range(0, len(batch), size):
                answers = await asyncio.gather(
                    *(_tokens(engine, f"{i}", p, sampling) for i, p in batch[at : at + size])
                )
                for (i, _), (token_ids, num_cached) in zip(
                    batch[at : at + size], answers, strict=True
                ):
                    _add(result, truth[f"{i}"], engine.logits.pop(f"{i}"))
                    result["texts"] += token_ids != cold[i][0]
                    result["reused"] += num_cached
        result["preemptions"] = engine.scheduler.num_preemptions
        result["restored"] = sum(tier.num_hit_tokens for tier in engine.stats.tiers)
        await engine.stop(1.0)
        results.append(result)
    return results


def _add(result: dict[str, Any], truth: list[torch.Tensor], warm: list[torch.Tensor]) -> None:
    result["logits"] += len(warm)
    same = len(truth) == len(warm) and all(map(torch.equal, truth, warm))
    result["different"] += not same
    for left, right in zip(truth, warm, strict=False):
        result["largest"] = max(result["largest"], float((left - right).abs().max()))


async def _tokens(
    engine: TorchEngine, name: str, prompt: list[int], sampling: SamplingParams
) -> tuple[list[int], int]:
    token_ids: list[int] = []
    num_cached = 0
    async for output in engine.generate(Request(name, tuple(prompt), sampling)):
        token_ids += output.token_ids
        num_cached = output.num_cached_tokens
    return token_ids, num_cached


def _prompts(draw: random.Random, args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Lengths from 2 to the longest, short and long alike, some around the attention's tiles;
    a third branch off an earlier prompt."""
    edges = [n for n in (15, 16, 17, 511, 512, 513) if n <= args.longest]
    prompts: list[list[int]] = []
    for number in range(args.prompts):
        if number < len(edges):
            size = edges[number]
        else:
            size = int(2 * (args.longest / 2) ** draw.random())
        base = draw.choice(prompts) if prompts and number % 3 == 0 else []
        base = base[: draw.randint(0, min(len(base), size - 1))]
        prompts.append(base + [draw.randrange(3, vocab_size) for _ in range(size - len(base))])
    return prompts
