"""`foreword bench transformers`: our forward against plain transformers, same process, dtype and
threads, in interleaved pairs, CPU seconds. Decode continues contexts of `--prompt` tokens."""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from foreword.cli.measure import add_model_arguments
from foreword.cli.settings import count
from foreword.engine.kv import cache_argument
from foreword.engine.model import DTYPES, load_model
from foreword.engine.runner import Part, Runner
from foreword.engine.settings import BLOCK_SIZE

STEPS = 4  # decode steps of one measurement
BATCH = 8  # sequences that decode together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--prompt", type=count, default=3000, help="tokens")
    parser.add_argument("--pairs", type=count, default=5)
    parser.add_argument(
        "--batch", type=count, default=BATCH, help="decodes at once, beside 1; 32 take 10 GB"
    )


class Ours:
    """A Runner with a batch of prefilled sequences; one more block table is for prefill."""

    def __init__(
        self,
        args: argparse.Namespace,
        exact: bool,
        quantise: str | None = None,
        batch: int = BATCH,
    ) -> None:
        model = load_model(args.model, dtype=args.dtype, quantise=quantise)
        self.per_sequence = -(-(args.prompt + STEPS + 1) // BLOCK_SIZE)
        self.batch = batch
        self.runner = Runner(model, (self.batch + 1) * self.per_sequence, BLOCK_SIZE, exact)
        self.prompt = args.prompt
        self.claims, self.reason = self.runner.exactness

    def prefill(self, token_ids: list[int], row: int | None = None) -> None:
        blocks = self.blocks(self.batch if row is None else row)
        self.runner.step([Part(blocks, 0, token_ids, True)])

    def prefill_batch(self, token_ids: list[int]) -> None:
        """All sequences: the first is computed, and the others have copies of its KV."""
        self.prefill(token_ids, 0)
        num_slots = self.per_sequence * BLOCK_SIZE
        for pool in (*self.runner.kv.keys, *self.runner.kv.values):
            by_sequence = pool[: self.batch * num_slots].view(-1, num_slots, *pool.shape[1:])
            by_sequence[1:] = by_sequence[0]

    def blocks(self, row: int) -> range:
        return range(row * self.per_sequence, (row + 1) * self.per_sequence)

    def decode(self, batch: int) -> None:
        for step in range(STEPS):
            at = self.prompt + step
            self.runner.step([Part(self.blocks(row), at, [7], True) for row in range(batch)])


class Plain:
    """transformers as it comes, with its own attention and cache."""

    def __init__(self, args: argparse.Namespace) -> None:
        folder = load_model(args.model, dtype=args.dtype).folder
        load: Any = AutoModelForCausalLM.from_pretrained
        self.model: Any = load(folder, dtype=DTYPES[args.dtype]).eval()
        self.name = cache_argument(self.model)
        self.caches: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def prefill(self, token_ids: list[int], batch: int = 0) -> None:
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([token_ids])
        self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.name: cache})
        if batch:
            cache.batch_repeat_interleave(batch)
            self.caches[batch] = cache

    @torch.inference_mode()
    def decode(self, batch: int) -> None:
        cache = self.caches[batch]
        for _ in range(STEPS):
            ids = torch.full((batch, 1), 7)
            self.model(input_ids=ids, use_cache=True, **{self.name: cache})
        cache.crop(-STEPS)  # negative: how many to take off the end


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Per figure: median CPU seconds and tokens per CPU second of each side, and medians of the
    pairs' ratios to plain."""
    torch.set_num_threads(args.threads)
    plain = Plain(args)
    off, on = (Ours(args, exact, batch=args.batch) for exact in (False, True))
    token_ids = torch.randint(3, 400, (args.prompt,)).tolist()
    batches = sorted({1, args.batch})
    for batch in batches:
        plain.prefill(token_ids, batch)
    for ours in (off, on):
        ours.prefill_batch(token_ids)
    figures: dict[str, Callable[[Any], None]] = {
        "prefill": lambda side: side.prefill(token_ids),
    }
    num_tokens = {"prefill": args.prompt}
    for batch in batches:
        figures[f"decode_batch_{batch}"] = partial(_decode, batch)
        num_tokens[f"decode_batch_{batch}"] = STEPS * batch
    report: dict[str, Any] = {
        "dtype": args.dtype,
        "threads": args.threads,
        "prompt_tokens": args.prompt,
        "exact": {"claimed": on.claims, "reason": on.reason},
    }
    for name, work in figures.items():
        spent: list[list[float]] = [[], [], []]
        for _ in range(args.pairs + 1):
            for side, seconds in zip((plain, off, on), spent, strict=True):
                begin_s = time.process_time()
                work(side)
                seconds.append(time.process_time() - begin_s)
        plain_s, off_s, on_s = (seconds[1:] for seconds in spent)  # the first warms up
        median_s = {
            side: statistics.median(seconds)
            for side, seconds in (("plain", plain_s), ("off", off_s), ("on", on_s))
        }
        report[name] = {
            "cpu_s": median_s,
            "tokens_per_cpu_s": {side: num_tokens[name] / s for side, s in median_s.items()},
            "off_over_plain": _ratio(off_s, plain_s),
            "on_over_plain": _ratio(on_s, plain_s),
            "on_over_off": _ratio(on_s, off_s),
        }
    return report


def _decode(batch: int, side: Any) -> None:
    side.decode(batch)


def _ratio(left: list[float], right: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(left, right, strict=True))
