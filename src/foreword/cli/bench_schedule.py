"""`foreword bench schedule`: what the order of waiting requests makes of trees of prompts, in
virtual time, on a device that has room for a part of the tree.

Four kinds of programs, each as a batch that is known at the start, in a drawn order; then as
programs that begin at random at a share of the rate at which the batch was done depth first; and
then the batch's requests one by one at random, which belong together and do not come together. Hits
are full blocks of prompts; the optimum is what no order and no cache of any size exceeds
(`sim.programs.most_hit_blocks`). A request is passed by those that came later and were admitted
before it.
"""

import argparse
import random
from bisect import bisect, insort
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from foreword.cli.settings import count
from foreword.core.cost import StepCost
from foreword.core.waiting import DEPTH_FIRST, LONGEST_PREFIX, MAX_PASSED, ORDERS
from foreword.sim.fleet import FleetRules, play
from foreword.sim.journey import Journey
from foreword.sim.percentile import percentile
from foreword.sim.programs import KINDS, arriving, batch, most_hit_blocks, one_by_one
from foreword.sim.prompt import visit
from foreword.sim.shape import WorkerShape
from foreword.sim.trace import Trace
from foreword.sim.workload import Segments

BLOCK_SIZE = 16
# A model of 8 billion parameters on one large GPU, as orders of magnitude.
COST = StepCost(3.2e-5, 1.1e-9, 6e-3, 5e-5, 5e-8)
# Programs of each kind, and blocks on the device: what runs at once fits, and the tree does not.
SIZES = {
    "few-shot": (60, 600),
    "self-consistency": (60, 900),
    "tree-of-thought": (40, 1200),
    "agents": (80, 10_000),
}
LOADS = (0.5, 0.9)
GOAL = 0.96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind", action="append", choices=tuple(KINDS), help="of programs; all by default"
    )
    parser.add_argument("--programs", type=count, help="of each kind (40 to 80)")
    parser.add_argument("--blocks", type=count, help="on the device (600 to 10,000, by kind)")
    parser.add_argument("--seed", type=count, default=1, help="of prompts, order and arrivals")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Keys: by kind what came of it; of all kinds the least shares of the optimum, depth first in
    a batch and longest prefix first at random, and by how many a request was passed at most."""
    kinds = {}
    for kind in args.kind or KINDS:
        num, num_blocks = SIZES[kind]
        shape = WorkerShape(args.blocks or num_blocks, COST, BLOCK_SIZE)
        kinds[kind] = measured(kind, args.programs or num, shape, args.seed)
    batches = [found["batch"][DEPTH_FIRST] for found in kinds.values()]
    at_random = [
        found[f"programs_at_{load}"][LONGEST_PREFIX] for found in kinds.values() for load in LOADS
    ]
    singles = [
        found[f"requests_at_{load}"][LONGEST_PREFIX] for found in kinds.values() for load in LOADS
    ]
    of_batch = min(one["of_optimum"] for one in batches)
    of_random = min(one["of_optimum"] for one in at_random)
    passed = max(one["most_passed"] for one in at_random + singles)
    return {
        "kinds": kinds,
        "batch_of_optimum": of_batch,
        "programs_of_optimum": of_random,
        "most_passed": passed,
        "most_passed_bound": MAX_PASSED,
        "ok": of_batch == 1 and of_random >= GOAL and passed <= MAX_PASSED,
    }


def measured(kind: str, num_programs: int, shape: WorkerShape, seed: int) -> dict[str, Any]:
    """All orders under all arrivals of one kind of programs."""
    programs = list(KINDS[kind](random.Random(seed), Segments(), num_programs))
    with batch(programs, random.Random(seed)) as trace:
        chains = (visit(record, BLOCK_SIZE).whole.hashes for record in trace)
        found: dict[str, Any] = {
            "requests": len(trace),
            "blocks_of_prompts": len({block_hash for hashes in chains for block_hash in hashes}),
            "blocks_of_device": shape.num_blocks,
            "batch": compared(trace, shape, {}),
        }
        rate = 1 / found["batch"][DEPTH_FIRST]["seconds"]
        for load in LOADS:
            coming, follows = arriving(programs, load * rate * num_programs, random.Random(seed))
            with coming:
                found[f"programs_at_{load}"] = compared(coming, shape, follows)
        for load in LOADS:
            with one_by_one(trace, load * rate * len(trace), random.Random(seed)) as coming:
                found[f"requests_at_{load}"] = compared(coming, shape, {})
    return found


def compared(
    trace: Trace, shape: WorkerShape, follows: Mapping[int, tuple[int, float]]
) -> dict[str, Any]:
    """A trace in every order."""
    most, total = most_hit_blocks(trace, BLOCK_SIZE)
    found: dict[str, Any] = {"optimum": most / total}
    for order in ORDERS:
        timing = play(trace, replace(shape, order=order), FleetRules(), follows=follows)
        journeys = timing.journeys
        num_hits = sum(journey.num_hit_tokens // BLOCK_SIZE for journey in journeys)
        ttfts_s = sorted(journey.first_token_s - journey.sent_s for journey in journeys)
        found[order] = {
            "hit_share": num_hits / total,
            "of_optimum": num_hits / most,
            "most_passed": most_passed(journeys),
            "seconds": timing.end_s,
            "ttft_mean_s": sum(ttfts_s) / len(ttfts_s),
            "ttft_p99_s": percentile(ttfts_s, 0.99),
            "refused": timing.num_refused,
        }
    return found


def most_passed(journeys: Iterable[Journey]) -> int:
    """Of any request: how many came later and were admitted before it."""
    most, admitted = 0, list[tuple[float, int]]()
    for journey in sorted(journeys, key=lambda journey: journey.turn):
        came = journey.sent_s, journey.place
        most = max(most, len(admitted) - bisect(admitted, came))
        insort(admitted, came)
    return most
