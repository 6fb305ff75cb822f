"""`foreword replay` in virtual time: what one worker or a fleet would have made of a trace, queues,
steps and first tokens included."""

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreword.cli.failure import Failure
from foreword.cli.plan import hardware_of, model_named, part, tier
from foreword.cli.settings import count
from foreword.cli.traces import opened_trace, progress_bar, written
from foreword.core.place import PLACEMENTS, Gain
from foreword.sim import plots
from foreword.sim.fleet import FleetRules, play
from foreword.sim.formats.request_log import LoggedEngine, read_engine
from foreword.sim.model import ShapeError
from foreword.sim.plan import PlanError, deployment
from foreword.sim.replay import BLOCK_SIZE
from foreword.sim.routing import ROUTES
from foreword.sim.shape import TierRoom, WorkerShape
from foreword.sim.tables import Row, table
from foreword.sim.timing import summary
from foreword.sim.trace import Trace, TraceError
from foreword.sim.trial import CORE_POLICIES, TIERS, UNLIMITED

_ASKED_BY = ("workers", "routing", "speed_up", "open_loop", "engine", "model", "hardware", "tier")
_OF_TABLES = ("compare", "device", "host", "disk", "restart_at", "per", "csv")
_TABLES_BY = (*_OF_TABLES, "blocks", "policy")
_WORKERS_MAX = 10_000
_TIMES = {"ttft_s": "first token", "queue_s": "waited to be admitted", "answer_s": "whole answer"}


def add_timed_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "in virtual time",
        "with any of these, or given a request log of foreword serve and no sizes, the requests "
        "meet queues and steps that take time",
    )
    group.add_argument("--workers", type=workers, help="how many share the requests (1)")
    group.add_argument("--routing", choices=tuple(ROUTES), help="to them (round-robin)")
    group.add_argument(
        "--speed-up",
        type=factor,
        metavar="TIMES",
        help="requests come so much sooner, whenever answers end",
    )
    group.add_argument(
        "--open-loop",
        action="store_true",
        help="requests come when the trace says, not after the answers that they came after",
    )
    group.add_argument(
        "--engine",
        type=Path,
        metavar="LOG",
        help="the engine of this request log of foreword serve, and what its steps cost (that of "
        "the trace, where that is such a log)",
    )
    group.add_argument("--model", help="in place of --engine: a model as foreword plan knows it")
    group.add_argument("--hardware", help="and what a worker of it runs on: h100:8")
    group.add_argument("--mfu", type=part, help="part of the peak that it reaches (1)")
    group.add_argument(
        "--tier",
        type=tier,
        action="append",
        metavar="NAME=SIZE@SPEED",
        help="below the device, in place of the engine's: disk=30TB@14GB/s,latency=0.1ms",
    )


def workers(text: str) -> int:
    """A whole number from 1, within reason: each has a cache of its own."""
    if count(text) > _WORKERS_MAX:
        raise argparse.ArgumentTypeError(f"{text} workers are more than {_WORKERS_MAX:,}")
    return count(text)


def factor(text: str) -> float:
    """A number above 0."""
    if not re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,9}", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no factor above 0, such as 2 or 0.5")
    return float(text)


def engine_of(args: argparse.Namespace) -> LoggedEngine | None:
    """What serves a replay in virtual time; None where none is asked for. Raises Failure."""
    asked = [name for name in _ASKED_BY if getattr(args, name)]
    own = _logged(Path(args.trace)) if args.trace != "-" else None
    if not asked and (own is None or any(getattr(args, name) for name in _TABLES_BY)):
        return None
    if others := [name for name in _OF_TABLES if getattr(args, name)]:
        flag, cause = others[0].replace("_", "-"), (asked or ["request log"])[0].replace("_", "-")
        raise Failure(f"--{flag} is not for a replay in virtual time (--{cause})", "usage")
    if args.engine and (args.model or args.hardware):
        raise Failure("--engine and --model both say what serves: give one", "usage")
    if args.mfu and not args.model:
        raise Failure("--mfu is of --model and --hardware", "usage")
    if args.engine:
        engine = _logged(args.engine)
        if engine is None:
            what = "no log of foreword serve" if args.engine.is_file() else "no file"
            raise Failure(f"--engine {args.engine} is {what}", "usage")
        return engine
    if args.model or args.hardware:
        return _planned(args)
    if own is None:
        raise Failure(
            "virtual time needs to know what serves: --engine LOG, or --model and --hardware",
            "usage",
        )
    return own


def run_timed(args: argparse.Namespace, engine: LoggedEngine) -> dict[str, Any] | str:
    """Raises Failure."""
    rules = FleetRules(
        num_workers=args.workers or 1,
        routing=args.routing or "round-robin",
        speed_up=args.speed_up or 1.0,
        closed=not args.open_loop,
        warmup=args.warmup,
        keep_partial=args.partial == "shared",
    )
    with opened_trace(args) as trace:
        shape = _shape(args, engine.shape, trace)
        # More room than all requests together take is only memory.
        most = 1 + sum(-(-num_tokens // shape.block_size) for num_tokens in trace.lengths)
        needed = replace(shape, num_blocks=min(shape.num_blocks, most))
        timing = play(trace, needed, rules, progress_bar())
        result = {
            "model": engine.model,
            "blocks": shape.num_blocks,
            "block_tokens": shape.block_size,
            "routing": rules.routing,
            **summary(timing, trace, shape, rules),
        }
        if args.plot:
            ttfts_s = {rules.routing: [j.first_token_s - j.sent_s for j in timing.journeys]}
            logged = [record.ttft_s for record in trace if record.ttft_s is not None]
            if logged:
                ttfts_s["logged"] = logged
            written(args.plot, lambda path: plots.plot_ttfts(ttfts_s, path))
    if args.model:
        said = "a data sheet does not rate decoding: an answer takes no more than its first token"
        result["notes"].insert(0, said)
    elif not engine.num_cost_steps:
        result["notes"].insert(0, "the engine has learnt no costs: steps take no time")
    return result if args.json else "\n".join(_lines(result))


def _logged(path: Path) -> LoggedEngine | None:
    try:
        return read_engine(path) if path.is_file() else None
    except TraceError as error:
        raise Failure(str(error), "failed") from error
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror or error}", "failed") from error


def _planned(args: argparse.Namespace) -> LoggedEngine:
    """A replica of a model on hardware, by its data sheet, which does not rate decoding: it takes
    no time."""
    if not (args.model and args.hardware):
        raise Failure("--model and --hardware go together", "usage")
    try:
        site = deployment(model_named(args.model), hardware_of(args.hardware), mfu=args.mfu or 1.0)
    except (PlanError, ShapeError) as error:
        raise Failure(str(error), "settings") from error
    size = args.block_size or BLOCK_SIZE
    block_bytes = round(size * site.kv_bytes)
    tiers = [
        TierRoom(one.name, int(one.num_bytes // block_bytes), one.cost)
        for one in site.rated_tiers()
    ]
    shape = WorkerShape(
        int(site.device_tokens // size),
        site.step,
        block_size=size,
        block_bytes=block_bytes,
        tiers=tuple(room for room in tiers if room.num_blocks),
        placement=Gain,
    )
    return LoggedEngine(site.model.name, shape, 1)


def _shape(args: argparse.Namespace, shape: WorkerShape, trace: Trace) -> WorkerShape:
    """The engine's, with blocks of the trace's size and what the flags change."""
    ids_each = args.block_size or shape.block_size
    shape = shape.of_blocks(trace.id_tokens if trace.id_tokens > 1 else ids_each)
    if args.policy:
        if len(args.policy) > 1 or args.policy[0] not in CORE_POLICIES:
            known = ", ".join(CORE_POLICIES)
            raise Failure(f"--policy in virtual time is one of {known}", "usage")
        shape = replace(shape, policy=CORE_POLICIES[args.policy[0]])
    if args.store:
        if len(args.store) > 1:
            raise Failure("--store in virtual time is one name", "usage")
        shape = replace(shape, placement=PLACEMENTS[args.store[0]])
    if args.tier:
        names = ["device", *(one.name for one in args.tier)]
        if len(set(names)) < len(names):
            raise Failure("--tier: each has a name of its own, and none is called device", "usage")
        rooms = (
            TierRoom(one.name, int(one.num_bytes // max(1, shape.block_bytes)), one.cost)
            for one in args.tier
        )
        shape = replace(shape, tiers=tuple(rooms))
    if args.blocks:
        shape = _resized(shape, args.blocks, keep_tiers=bool(args.tier))
    if shape.num_blocks < 1:
        raise Failure(f"the device holds no block of {shape.block_size:,} tokens", "settings")
    return shape


def _resized(
    shape: WorkerShape, capacities: list[tuple[int | None, ...]], *, keep_tiers: bool
) -> WorkerShape:
    """Of this size, with the tiers that have one."""
    if len(capacities) > 1 or UNLIMITED in capacities[0]:
        raise Failure("--blocks in virtual time is one number for each tier", "usage")
    device, *lower = (size or 0 for size in capacities[0])
    rooms = {room.name: room for room in shape.tiers}
    sized = dict(zip(TIERS[1:], lower, strict=False))
    for name, size in sized.items():
        if size and name not in rooms:
            raise Failure(
                f"--blocks with a {name}: say how fast it is with --tier {name}=SIZE@SPEED", "usage"
            )
    tiers = [replace(room, num_blocks=sized.get(name, 0)) for name, room in rooms.items()]
    kept = shape.tiers if keep_tiers and not lower else [room for room in tiers if room.num_blocks]
    return replace(shape, num_blocks=device, tiers=tuple(kept))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{result['requests']:,} requests to {len(result['workers'])} × {result['model']} with "
        f"{result['blocks']:,} blocks of {result['block_tokens']} tokens; {result['seconds']:,.1f} "
        "virtual seconds"
    )
    by_tier = ", ".join(f"{num:,} {name}" for name, num in result["hit_tokens_by_tier"].items())
    yield (
        f"reused {result['hit_share']:.2%} of {result['prompt_tokens']:,} prompt tokens ({by_tier})"
    )
    names = result["workers"][0]["tiers"] if result["workers"] else ()
    for name in names:
        tiers = [worker["tiers"][name] for worker in result["workers"]]
        stored, loaded = (sum(t[f"{verb}_bytes"] for t in tiers) for verb in ("stored", "loaded"))
        yield f"{name}: {stored / 1e9:,.1f} GB written, {loaded / 1e9:,.1f} GB read"
    logged = result.get("logged", {})
    if "hit_share" in logged:
        yield f"logged {logged['hit_share']:.2%} ({logged['hit_tokens']:,})"
    yield ""
    times = [{"seconds": said, **result[name]} for name, said in _TIMES.items() if name in result]
    if "ttft_s" in logged:
        times.insert(1, {"seconds": "first token, logged", **logged["ttft_s"]})
    names = ("seconds", "median", "p90", "p99", "mean")
    shown: list[Row] = [{name: _seconds(row[name]) for name in names} for row in times]
    yield from table(shown, {name: name for name in names})
    yield ""
    workers = [{"worker": number, **worker} for number, worker in enumerate(result["workers"])]
    columns = ("worker", "requests", "hit_share", "busy_share", "steps", "most_waiting")
    headings = {name: name.replace("_", " ").replace("share", "%") for name in columns}
    yield from table(workers, headings)
    yield ""
    for name, said in (("refused", "longer than a worker's room"), ("left", "left unanswered")):
        if num := result[f"{name}_requests"]:
            yield f"{num:,} requests {said}: in no figure."
    yield from (f"{note}." for note in result["notes"])


def _seconds(value: float | str) -> str:
    """With three digits that count."""
    if isinstance(value, str) or not value:
        return str(value or "0")
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"
