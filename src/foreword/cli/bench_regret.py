"""`foreword bench regret`: is any request slower with the cache than without, whatever the tier?

In virtual time, through the production cache and scheduler: `foreword.sim.regret` says how a cell
is played. What is expected of a tier before the first request is what a calibration would have
found, its latency and bandwidth without stalls; with `--cold` what the engine expects of an unknown
disk.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foreword.cli.failure import Failure
from foreword.cli.settings import count
from foreword.core.cost import TierCost
from foreword.core.policy import LRU
from foreword.core.waiting import ARRIVAL
from foreword.sim.catalogue import HARDWARE, MODELS, hardware_named
from foreword.sim.model import DTYPE_BYTES
from foreword.sim.regret import EXPECTED, Cell, grid, judged, measure, switched
from foreword.sim.rivals import RIVALS
from foreword.sim.shape import WorkerShape

BLOCK_SIZE = 16  # tokens
SHARE_MAX, P99_MAX = 0.01, 1.01  # of requests that are slower; of P99 with the cache over without
# From when on the tier of `switch` is slow, and how: a bandwidth, a latency.
GOOD, BAD = TierCost(0.001, 20e9), (TierCost(0.001, 10e6), TierCost(5.0, 20e9))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3.1-8b", help="of the catalogue")
    parser.add_argument("--hardware", default="h100", help="of the catalogue")
    parser.add_argument("--gb-per-s", type=numbers, default="0.05,0.5,2,10,50")
    parser.add_argument("--latency-ms", type=numbers, default="0.05,1,20,200")
    parser.add_argument("--stalls", type=numbers, default="0,0.01,0.05", help="shares of reads")
    parser.add_argument("--prompt-tokens", type=numbers, default="256,2048,8192,32768")
    parser.add_argument("--requests", type=count, default=50, help="of each cell")
    parser.add_argument("--rivals", default=",".join(RIVALS), help="whose rules to play too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="nothing is known of the tier at first")


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """`regretted_share` and `p99_ratio` are over all requests of all cells; `p99_ratio` is the
    largest over kinds of cells, that is lengths and arrivals, of the P99 of all their requests with
    the cache over the one without. Those of each cell are in `cells`, `rivals` has the same of the
    others' rules; `switch` is of a tier that becomes slow and recovers."""
    logging.getLogger("foreword").setLevel(logging.ERROR)  # tiers that hang are the experiment
    shape = shape_of(args.model, args.hardware)
    rivals = [name for name in args.rivals.split(",") if name]
    if unknown := set(rivals) - set(RIVALS):
        raise Failure(f"--rivals {unknown.pop()}: there are {', '.join(RIVALS)}", "usage")
    lengths = [int(length) for length in args.prompt_tokens]
    cells = grid(
        [rate * 1e9 for rate in args.gb_per_s],
        [latency / 1e3 for latency in args.latency_ms],
        args.stalls,
        lengths,
    )
    expected = EXPECTED if args.cold else None
    rows = list(measure(cells, shape, args.requests, rivals, args.seed, expected))
    ours, *others = (total(rows, name) for name in ("ours", *rivals))
    turns = [switched(shape, (GOOD, bad), 8192, 300, args.seed) for bad in BAD]
    return {
        **ours,
        "ok": ours["regretted_share"] <= SHARE_MAX and ours["p99_ratio"] <= P99_MAX,
        "requests": sum(len(row[1]["off"]) for row in rows),
        "rivals": dict(zip(rivals, others, strict=True)),
        "switch": turns,
        "cells": [
            cell.shown() | {name: judged(by["off"], by[name]) for name in by if name != "off"}
            for cell, by in rows
        ],
    }


def shape_of(model: str, hardware: str) -> WorkerShape:
    """A worker of the catalogue's figures: a step reads all weights once and computes at the
    device's peak. First come, first served, with a cache and without: what another order makes
    slower is none of the tier's. It is given room for everything, so that no policy counts."""
    if model not in MODELS:
        raise Failure(f"--model {model}: there are {', '.join(MODELS)}", "usage")
    if hardware not in HARDWARE:
        raise Failure(f"--hardware {hardware}: there are {', '.join(HARDWARE)}", "usage")
    found, machine = MODELS[model], hardware_named(hardware)
    step_s = found.weights_bytes() / machine.hbm_bytes_per_s
    cost = replace(found.step_cost(machine.flops_per_s), per_step_s=step_s)
    block_bytes = int(BLOCK_SIZE * found.kv_numbers * DTYPE_BYTES["bfloat16"])
    return WorkerShape(0, cost, BLOCK_SIZE, block_bytes, policy=LRU, order=ARRIVAL)


def total(rows: Sequence[tuple[Cell, dict[str, list[float]]]], name: str) -> dict[str, Any]:
    """Of one rule, over all cells."""
    kinds: dict[tuple[int, bool], tuple[list[float], list[float]]] = {}
    for cell, by in rows:
        off, on = kinds.setdefault((cell.num_tokens, cell.together), ([], []))
        off += by["off"]
        on += by[name]
    found = [judged(off, on) for off, on in kinds.values()]
    num = len(found)
    return {
        "regretted_share": sum(one["regretted_share"] for one in found) / num,
        "faster_share": sum(one["faster_share"] for one in found) / num,
        "p99_ratio": max(one["p99_ratio"] for one in found),
        "worst_cell_p99_ratio": max(judged(by["off"], by[name])["p99_ratio"] for _c, by in rows),
        "mean_ratio": sum(one["mean_ratio"] for one in found) / num,
        "regretted_share_by_kind": {
            f"{length} tokens, {'poisson' if together else 'one by one'}": one["regretted_share"]
            for (length, together), one in zip(kinds, found, strict=True)
        },
    }
