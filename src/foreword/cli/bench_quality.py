"""`foreword bench quality`: what quantised weights cost in quality, and what they give in speed.

Both models, bfloat16 and quantised, read windows of one text, the topics that ship with Python's
`help()`, and their distributions of each next token are compared. Speeds are of interleaved pairs;
decode continues contexts of `--prompt` tokens.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from foreword.cli.bench_transformers import STEPS, Ours
from foreword.cli.measure import mean_interval
from foreword.cli.settings import count
from foreword.engine.model import LoadedModel
from foreword.engine.runner import Part

TEXT = "pydoc_data.topics"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder")
    parser.add_argument("--quantise", choices=("int4", "int8"), default="int4")
    parser.add_argument("--threads", type=count, default=2, help="torch threads")
    parser.add_argument("--exact", choices=("auto", "off"), default="auto")
    parser.add_argument("--windows", type=count, default=16, help="of the text")
    parser.add_argument("--window-tokens", type=count, default=256)
    parser.add_argument("--prompt", type=count, default=512, help="tokens, for the speeds")
    parser.add_argument("--pairs", type=count, default=7)
    parser.set_defaults(dtype="bfloat16")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Keys: `quality` (divergences in nats), then per speed the medians of tokens per second and
    the quotients of the pairs, quantised over bfloat16: above 1 is quicker."""
    torch.set_num_threads(args.threads)
    exact = args.exact == "auto"
    sides = {
        "bfloat16": Ours(args, exact),
        args.quantise: Ours(args, exact, args.quantise),
    }
    plain, quantised = sides.values()
    model = quantised.runner.model
    assert model.quantised is not None
    text = help_text()
    parts = windows(plain.runner.model, text, args.windows, args.window_tokens)
    return {
        "model": model.name,
        "weights": model.quantised.description,
        "threads": args.threads,
        "exact": {
            name: {"claimed": side.claims, "reason": side.reason} for name, side in sides.items()
        },
        "text": {
            "source": TEXT,
            "sha256": sha256(text.encode()).hexdigest(),
            "tokens": sum(map(len, parts)),
        },
        "quality": compared(plain, quantised, parts),
        "prompt_tokens": args.prompt,
        "pairs": args.pairs,
        **speeds(sides, args.prompt, args.pairs),
    }


def help_text() -> str:
    """The same in every run of one version of Python."""
    topics: dict[str, str] = importlib.import_module(TEXT).topics
    return "\n".join(topics[name] for name in sorted(topics))


def windows(model: LoadedModel, text: str, num_windows: int, num_tokens: int) -> list[list[int]]:
    """Evenly spaced openings of the text, of up to `num_tokens` tokens each."""
    size = len(text) // num_windows
    starts = [text[number * size : (number + 1) * size] for number in range(num_windows)]
    return [model.token_ids(start, False)[:num_tokens] for start in starts]


def compared(plain: Ours, quantised: Ours, parts: list[list[int]]) -> dict[str, Any]:
    divergences, agreements = [], []
    losses: dict[str, list[Tensor]] = {"bfloat16": [], "quantised": []}
    for token_ids in parts:
        truth, other = (log_probabilities(side, token_ids) for side in (plain, quantised))
        divergences.append((truth.exp() * (truth - other)).sum(1))
        agreements.append((truth.argmax(1) == other.argmax(1)).double())
        following = torch.tensor(token_ids[1:])[:, None]
        for name, found in (("bfloat16", truth), ("quantised", other)):
            losses[name].append(-found[:-1].gather(1, following)[:, 0])
    divergence = torch.cat(divergences)
    return {
        "positions": len(divergence),
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(divergence.quantile(0.99)),
        "top1_agreement": float(torch.cat(agreements).mean()),
        "perplexity": {
            name: float(torch.cat(values).mean().exp()) for name, values in losses.items()
        },
    }


def log_probabilities(side: Ours, token_ids: list[int]) -> Tensor:
    """Of the next token after every token: [tokens, vocab], float64. Each token is a part of its
    own, since a part has logits after its last one only."""
    blocks = side.blocks(8)
    parts = [Part(blocks, at, [token_id], True) for at, token_id in enumerate(token_ids)]
    return side.runner.step(parts).double().log_softmax(1)


def speeds(sides: dict[str, Ours], num_tokens: int, num_pairs: int) -> dict[str, Any]:
    token_ids = torch.randint(3, 400, (num_tokens,)).tolist()
    for side in sides.values():
        for row in range(8):
            side.prefill(token_ids, row)
    figures: dict[str, tuple[int, Callable[[Ours], None]]] = {
        "decode_batch_1": (STEPS, lambda side: side.decode(1)),
        "decode_batch_8": (8 * STEPS, lambda side: side.decode(8)),
        "prefill": (num_tokens, lambda side: side.prefill(token_ids)),
    }
    return {name: _speed(sides, work, num, num_pairs) for name, (num, work) in figures.items()}


def _speed(
    sides: dict[str, Ours], work: Callable[[Ours], None], num_tokens: int, num_pairs: int
) -> dict[str, Any]:
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(num_pairs + 1):
        for name in list(sides) if pair % 2 else reversed(sides):
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            work(sides[name])
            if pair:  # the first warms up
                wall[name].append(time.perf_counter() - begin_s)
                cpu[name].append(time.process_time() - begin_cpu_s)
    ratios = _quotients(wall)
    return {
        "tokens_per_s": {
            name: num_tokens / statistics.median(spent) for name, spent in wall.items()
        },
        "speedup": statistics.median(ratios),
        "speedup_ci": mean_interval(ratios),
        "cpu_speedup": statistics.median(_quotients(cpu)),
    }


def _quotients(spent: dict[str, list[float]]) -> list[float]:
    plain, quantised = spent.values()
    return [a / b for a, b in zip(plain, quantised, strict=True)]
