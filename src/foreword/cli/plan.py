"""`foreword plan`: what a model's KV takes on a machine, when loading it beats computing it, and
which sizes of cache a trace or a described workload asks for."""

import argparse
import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreword.cli.failure import Failure
from foreword.cli.here import measured_hardware
from foreword.cli.plan_text import page
from foreword.cli.settings import count, size
from foreword.cli.traces import add_trace_flags, opened_trace, progress_bar
from foreword.core.cost import TierCost
from foreword.sim.catalogue import HARDWARE, MODELS, Hardware, hardware_named
from foreword.sim.formats.request_log import read_engine
from foreword.sim.model import DTYPE_BYTES, ModelShape, ShapeError, read_shape
from foreword.sim.plan import (
    Deployment,
    Plan,
    PlanError,
    PlannedTier,
    deployment,
    plan_of,
)
from foreword.sim.replay import BLOCK_SIZE
from foreword.sim.sizing import verdict
from foreword.sim.trace import Trace, TraceError
from foreword.sim.traffic import traffic_of
from foreword.sim.workload import KINDS, Chat, WorkloadError, chat_figures, described, trace_of

HERE = "here"
_REPLICAS = (1, 2, 4, 8, 16)  # whose devices together are sizes on the curve
_TIER = re.compile(r"(\w+)=([^@,]+)@([^,]+)((?:,\w+=[^,]+)*)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        help="a name such as llama-3.1-8b, or a Hugging Face folder or its config.json",
    )
    parser.add_argument(
        "--hardware",
        required=True,
        help=f"{', '.join(HARDWARE)}; h100:8 for eight of them; or {HERE}: this machine, measured",
    )
    parser.add_argument(
        "--weights-dtype", choices=tuple(DTYPE_BYTES), help="(the one that they are published in)"
    )
    parser.add_argument("--kv-dtype", choices=tuple(DTYPE_BYTES), default="bfloat16")
    parser.add_argument(
        "--devices-per-replica", type=count, help="(the fewest that hold the weights)"
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="LOG",
        help="a request log of foreword serve, whose engine learnt what its steps and tiers cost: "
        "in place of the hardware's rates",
    )
    parser.add_argument(
        "--mfu",
        type=part,
        default=1.0,
        help="which part of the peak prefill reaches, such as 0.4",
    )
    add_trace_flags(parser, "--trace")
    parser.add_argument(
        "--workload",
        metavar="KIND[:NAME=NUMBER,…]",
        help=f"described instead: {', '.join(KINDS)}; such as chat:turns=20,user=100,rate=0.5",
    )
    parser.add_argument(
        "--tier",
        type=tier,
        action="append",
        default=[],
        metavar="NAME=SIZE@SPEED",
        help="below the device, the fastest first: disk=30TB@14GB/s,shared_by=8,latency=0.1ms "
        "(host memory, disk and network of the hardware's data sheet)",
    )
    parser.add_argument(
        "--price",
        type=price,
        action="append",
        default=[],
        metavar="NAME=PRICE/GB",
        help="of a tier, such as disk=0.1/GB or host=3000/TB",
    )
    parser.add_argument("--explain", action="store_true", help="each figure with its formula")


def run(args: argparse.Namespace) -> dict[str, Any] | int:
    """Raises Failure for what cannot be planned."""
    if args.trace and args.workload:
        raise Failure("give --trace or --workload, not both", "usage")
    try:
        site = site_of(args)
        plan = plan_of(site)
        workload = described(args.workload) if args.workload else None
        if isinstance(workload, Chat):
            plan.figures += chat_figures(workload, site)
        if args.trace or workload:
            trace = opened_trace(args) if workload is None else trace_of(workload)
            add_traffic(
                plan, trace, args.block_size or BLOCK_SIZE, workload.rate_s if workload else None
            )
        elif args.price:
            raise Failure("--price is for --trace or --workload: what do the sizes save?", "usage")
    except (PlanError, ShapeError, TraceError, WorkloadError) as error:
        raise Failure(str(error), "settings") from error
    if args.json:
        return plan.as_json()
    print("\n".join(page(plan, explain=args.explain)), flush=True)
    return 0


def site_of(args: argparse.Namespace) -> Deployment:
    """What is planned for. Raises Failure, PlanError, ShapeError."""
    site = deployment(
        model_named(args.model),
        hardware_of(args.hardware),
        weights_dtype=args.weights_dtype,
        kv_dtype=args.kv_dtype,
        mfu=args.mfu,
        devices_per_replica=args.devices_per_replica,
        tiers=args.tier,
    )
    if args.costs:
        site = as_learnt(site, args.costs, keep_tiers=bool(args.tier))
    prices = dict(args.price)
    unknown = set(prices) - {tier.name for tier in site.tiers}
    if unknown:
        names = ", ".join(tier.name for tier in site.tiers)
        raise Failure(f"--price {min(unknown)}: there is no such tier, only {names}", "usage")
    tiers = tuple(replace(tier, per_gb=prices.get(tier.name)) for tier in site.tiers)
    return replace(site, tiers=tiers)


def as_learnt(site: Deployment, log: Path, *, keep_tiers: bool) -> Deployment:
    """With what the engine of a request log learnt. Raises Failure, TraceError."""
    try:
        engine = read_engine(log)
    except OSError as error:
        raise Failure(f"--costs {log} cannot be read: {error.strerror}", "usage") from error
    if engine is None or not engine.num_cost_steps:
        what = "a log without costs: serve more requests" if engine else "no log of foreword serve"
        raise Failure(f"--costs {log} is {what} (foreword serve --request-log FILE)", "usage")
    shape = engine.shape
    if shape.block_bytes != round(shape.block_size * site.kv_bytes):
        raise Failure(
            f"--costs {log} is of {engine.model}, whose tokens take "
            f"{shape.block_bytes / shape.block_size:,.0f} bytes of KV, not {site.kv_bytes:,.0f}",
            "usage",
        )
    if not shape.cost.per_token_s:
        raise Failure(f"--costs {log} does not tell a token's cost: serve other prompts", "usage")
    own = [
        PlannedTier(room.name, room.num_blocks * shape.block_bytes, room.cost)
        for room in shape.tiers
        if room.cost.bytes_per_s < math.inf  # where the log has a read
    ]
    tiers = tuple(own) if own and not keep_tiers else site.tiers
    return replace(site, learnt=shape.cost, tiers=tiers)


def model_named(name: str) -> ModelShape:
    """Of the catalogue, or of a folder or file. Raises Failure, ShapeError."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name)
    if path.exists():
        return read_shape(path)
    raise Failure(f"--model {name} is no file and none of {nearest(name, MODELS)}", "model")


def hardware_of(name: str) -> Hardware:
    """Raises Failure."""
    if name.lower() == HERE:
        return measured_hardware()
    try:
        return hardware_named(name)
    except KeyError:
        known = nearest(name.partition(":")[0], [*HARDWARE, HERE])
        raise Failure(f"--hardware {name} is none of {known}", "usage") from None
    except ValueError:
        raise Failure(f"--hardware {name} is no number of devices: h100:8", "usage") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Those that look like it; all where none does."""
    names = list(known)
    return ", ".join(difflib.get_close_matches(name.lower(), names, n=5, cutoff=0.4) or names)


def add_traffic(plan: Plan, trace: Trace, block_size: int, rate: float | None = None) -> None:
    """What the requests ask for, at `rate` a second, or as the trace has them; closes the trace."""
    site = plan.site
    with trace:
        sizes = [number * site.device_tokens for number in _REPLICAS]
        sizes += [tier.num_bytes / site.kv_bytes for tier in site.tiers if tier.num_bytes]
        traffic = traffic_of(trace, sizes, block_size, progress_bar())
        plan.notes += trace.notes
    if rate is not None:  # a few sessions begin and end: their span says less
        traffic = replace(traffic, span_s=len(traffic.num_tokens) / rate)
    found = verdict(site, traffic)
    plan.figures += found.figures
    plan.tables += found.tables
    plan.notes += found.notes


def part(text: str) -> float:
    """A number above 0, at most 1."""
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", text) or not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no part of a whole, such as 0.4")
    return float(text)


def tier(text: str) -> PlannedTier:
    """`disk=30TB@14GB/s,shared_by=8,latency=0.1ms`."""
    found = _TIER.fullmatch(text)
    if not found or not found[3].endswith("/s"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no tier: write it as disk=30TB@14GB/s,shared_by=8"
        )
    more = dict(pair.split("=", 1) for pair in found[4].split(",") if pair)
    latency = re.fullmatch(r"([0-9.]+)(us|ms|s)", more.pop("latency", "0s"))
    shared_by = count(more.pop("shared_by", "1"))
    if more or not latency:
        raise argparse.ArgumentTypeError(
            f"{text!r}: after the speed there can be shared_by=8 and latency=0.1ms"
        )
    latency_s = float(latency[1]) * _SECONDS[latency[2]]
    cost = TierCost(latency_s, size(found[3].removesuffix("/s")), shared_by)
    return PlannedTier(found[1], size(found[2]), cost)


def price(text: str) -> tuple[str, float]:
    """`disk=0.1/GB`: the tier, and the price of 10^9 bytes."""
    found = re.fullmatch(r"(\w+)=([0-9]*\.?[0-9]+)/([GT]i?B)", text, re.IGNORECASE)
    if not found or not float(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no price: write it as disk=0.1/GB")
    return found[1], float(found[2]) / (size(f"1{found[3]}") / 1e9)
