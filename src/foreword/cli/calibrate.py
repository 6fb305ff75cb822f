"""`foreword calibrate`: what prefill, decode and the tiers' reads cost here, measured anew.

`foreword serve` with the same model and settings begins with what it finds.
"""

import argparse
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from foreword.cli.failure import Failure
from foreword.cli.serve import check_device
from foreword.cli.settings import add_model_flags, engine_settings
from foreword.engine.source import locate

CONTEXTS = (0, 1024, 4096, 16384, 65536)  # tokens before the 1,000 that are prefilled
STEPS_S, READS_S = 20.0, 3.0  # that it may take, for steps and for each tier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)


def run(args: argparse.Namespace) -> Mapping[str, Any] | str:
    """Keys: `prefill` (by context), `tiers` (by name), `steps` with what the fit says of each, and
    its mean `error`, as a share; `path`, where it is remembered. Raises Failure."""
    settings = engine_settings(args)
    path, name = locate(args.model)

    import torch

    from foreword.engine.calibration import time_steps
    from foreword.engine.engine import TorchEngine
    from foreword.engine.known_costs import Memo, measure_reads, memo_path

    check_device(args.device)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    alone = replace(settings, model=str(path), host_bytes=0, disk_bytes=0)
    try:
        engine = TorchEngine.load(alone)
    except ValueError as error:
        raise Failure.of(error) or Failure(str(error), "settings") from error
    begin_s = time.perf_counter()
    runner, memo = engine.runner, Memo.recall(memo_path(engine.runner))
    steps = time_steps(runner, STEPS_S)
    cost = steps.cost
    if cost is None or not steps.are_enough:
        reason = f"too few steps fit in {STEPS_S:.0f} s, --kv-bytes and the model's context"
        raise Failure(f"{reason} to tell their costs", "failed")
    memo.steps = steps.fit
    for tier in ("host", "disk") if settings.disk_bytes else ("host",):
        reads = measure_reads(tier, runner, settings, READS_S)
        if reads is not None:
            memo.reads[tier] = reads
    memo.save()
    costs = engine.cache.restores.costs
    assert costs is not None
    costs.step = cost
    result = {
        "model": name,
        "dtype": args.dtype,
        "device": args.device,
        "threads": torch.get_num_threads(),
        "prefill": [
            {
                "context": context,
                "seconds_per_1000_tokens": costs.compute_s(context, context + 1000),
                "break_even_bytes_per_s": costs.break_even_bytes_per_s(context, context + 1000),
            }
            for context in CONTEXTS
            if not context or context + 1000 <= engine.card.max_model_len
        ],
        "error": steps.error,
        "tiers": {
            tier: {
                "latency_s": reads.latency_s,
                "gb_per_s": reads.bytes_per_s / 1e9,
                "error": reads.error,
            }
            for tier, reads in memo.reads.items()
        },
        "steps": [
            {**asdict(shape), "seconds": took_s, "fitted_s": cost.step_s(shape.work)}
            for shape, took_s in steps.seconds.items()
        ],
        "took_s": time.perf_counter() - begin_s,
        "path": str(memo.path),
    }
    return result if args.json else "\n".join(table(result))


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """The result for people, line by line."""
    about = f"{result['model']}, {result['dtype']} on {result['device']}"
    yield f"{about}, {result['threads']} threads, measured in {result['took_s']:.1f} s"
    yield ""
    yield f"{'prefill after':>14}{'of 1,000 tokens':>18}{'loading pays from':>20}"
    for row in result["prefill"]:
        mb_per_s = row["break_even_bytes_per_s"] / 1e6
        seconds = row["seconds_per_1000_tokens"]
        yield f"{row['context']:>14,}{seconds:>16.3g} s{mb_per_s:>15,.4g} MB/s"
    yield ""
    yield f"{'tier':>14}{'latency':>18}{'reads':>20}{'error':>9}"
    for name, tier in result["tiers"].items():
        latency_ms = tier["latency_s"] * 1e3
        yield f"{name:>14}{latency_ms:>15.3g} ms{tier['gb_per_s']:>15.3g} GB/s{tier['error']:>9.0%}"
    yield ""
    yield f"{'sequences':>14}{'new tokens each':>18}{'after':>20}{'took':>12}{'fitted':>12}"
    for step in result["steps"]:
        shape = f"{step['count']:>14}{step['num_tokens']:>18,}{step['context']:>20,}"
        yield f"{shape}{step['seconds'] * 1e3:>9.1f} ms{step['fitted_s'] * 1e3:>9.1f} ms"
    yield ""
    yield f"The fit of the steps is {result['error']:.1%} off on average: so far is prefill's cost."
    yield f"Remembered in {result['path']}: a server begins with it."
