"""`foreword replay`: what caches of several sizes and policies would have reused of a trace."""

import argparse
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from typing import Any

from foreword.cli.failure import Failure
from foreword.cli.replay_timed import add_timed_flags, engine_of, run_timed
from foreword.cli.settings import count, size, size_or_none
from foreword.cli.traces import add_trace_flags, opened_trace, progress_bar, written
from foreword.core.place import PLACEMENTS, Gain, WriteThrough
from foreword.core.policies import DEFAULT
from foreword.sim import plots
from foreword.sim.replay import BLOCK_SIZE, POLICY_NAMES, Findings, Rules, replay
from foreword.sim.tables import group_rows, rows, table, write_csv
from foreword.sim.trace import Trace
from foreword.sim.trial import (
    ENDLESS,
    LEAF_FIFO,
    MOVE_SHARE,
    OPT,
    PLAIN_FIFO,
    TIERS,
    UNLIMITED,
    Setting,
)

Capacity = tuple[int | None, ...]  # as Setting.blocks

_CURVE = (256, 64, 16, 4)  # parts of a trace's blocks that the default capacities are
_TOP_GROUPS = 20
_ALWAYS = ("hit_tokens", "hit_blocks")
_HEADINGS = {
    "policy": "policy",
    "store": "store",
    "blocks": "blocks",
    "host_blocks": "host",
    "disk_blocks": "disk",
    "hit_tokens": "hit tokens %",
    "hit_blocks": "hit blocks %",
    **{f"{tier}_hit_tokens": f"{tier} hit %" for tier in TIERS},
    **{f"{tier}_stored_blocks": f"{tier} stored" for tier in TIERS[1:]},
    "opt_share": "of OPT %",
    "regret": "regret %",
    "ceiling_share": "of unlimited %",
    "evicted_blocks": "evicted",
    "refused_requests": "refused",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_flags(parser)
    parser.add_argument(
        "--policy",
        type=policies,
        metavar="NAMES",
        help=f"which block leaves first, with commas between: {', '.join(POLICY_NAMES)} "
        f"({DEFAULT.name})",
    )
    parser.add_argument(
        "--store",
        type=stores,
        metavar="NAMES",
        help=f"what goes to the tiers below, with commas between: {', '.join(PLACEMENTS)} "
        f"({WriteThrough.name}; in virtual time the server's own)",
    )
    parser.add_argument(
        "--blocks",
        type=capacities,
        metavar="SIZES",
        help="capacities in blocks of the trace, with commas between: 1409,5637; "
        "DEVICE+HOST+DISK for tiers; unlimited (a curve)",
    )
    parser.add_argument(
        "--compare",
        type=settings,
        metavar="SETTINGS",
        help="in place of these: lru@1409,opt@1000+5000,lru@1000+0+5000:gain",
    )
    parser.add_argument("--device", type=size, help="in place of --blocks: 64GiB, by bytes")
    parser.add_argument("--host", type=size_or_none, default=0, help="memory below it")
    parser.add_argument("--disk", type=size_or_none, default=0, help="disk below that")
    parser.add_argument("--bytes-per-token", type=count, metavar="BYTES", help="of a token's KV")
    parser.add_argument(
        "--warmup", type=share, default=0.0, help="share of the requests that no figure counts"
    )
    parser.add_argument(
        "--restart-at", type=share, metavar="SHARE", help="start anew there; the disk keeps its KV"
    )
    parser.add_argument(
        "--partial",
        default="unshared",
        choices=("unshared", "shared"),
        help="shared: equal unfinished last blocks match too, as in kvcache-simulator",
    )
    parser.add_argument("--per", choices=("session", "tenant"), help="the largest ones apart")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the rows, as CSV")
    parser.add_argument(
        "--plot",
        type=picture,
        metavar="FILE",
        help="hit rates, or in virtual time first tokens, as .png or .svg",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_timed_flags(parser)


def policies(text: str) -> list[str]:
    return [_policy(name) for name in text.split(",")]


def stores(text: str) -> list[str]:
    return [_store(name) for name in text.split(",")]


def capacities(text: str) -> list[Capacity]:
    return [_capacity(word) for word in text.split(",")]


def settings(text: str) -> list[Setting]:
    found = []
    for word in text.split(","):
        name, at, capacity = word.partition("@")
        if not at:
            raise argparse.ArgumentTypeError(f"{word!r} is no setting: write it as lru@1409")
        sizes, colon, store = capacity.partition(":")
        stored = _store(store) if colon else WriteThrough.name
        found.append(Setting(_policy(name), _capacity(sizes), stored))
    return found


def share(text: str) -> float:
    """A share below all."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to below 1, such as 0.5")
    return found


def picture(text: str) -> Path:
    if Path(text).suffix not in plots.SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} ends in neither of {', '.join(plots.SUFFIXES)}")
    return Path(text)


def run(args: argparse.Namespace) -> dict[str, Any] | str:
    """Raises Failure for options that contradict each other, and for what is no trace."""
    if engine := engine_of(args):
        return run_timed(args, engine)
    _check(args)
    rules = Rules(
        args.block_size or BLOCK_SIZE,
        keep_partial=args.partial == "shared",
        warmup=args.warmup,
        restart_at=args.restart_at,
        per=args.per,
    )
    with opened_trace(args) as trace:
        findings = replay(trace, _settings(args, rules, trace), rules, progress_bar())
        result = _result(args, trace, findings)
    if args.csv:
        written(args.csv, lambda path: write_csv(result["rows"], path))
    if args.plot:
        written(args.plot, lambda path: _plot(findings, path))
    return result if args.json else "\n".join(_lines(result))


def _check(args: argparse.Namespace) -> None:
    for name, other in combinations(("compare", "blocks", "device"), 2):
        if getattr(args, name) and getattr(args, other):
            raise Failure(f"--{name} and --{other} both say how large: give one", "usage")
    for name in ("policy", "store"):
        if args.compare and getattr(args, name):
            raise Failure(f"--compare names its policies itself, without --{name}", "usage")
    if (args.host or args.disk) and not args.device:
        raise Failure("--host and --disk lie below --device: give that too", "usage")
    if args.device and not args.bytes_per_token:
        raise Failure("--device in bytes needs --bytes-per-token, of the model's KV", "usage")
    if args.plot:
        import_module("matplotlib")  # an extra: missed now, not after the replay


def _settings(args: argparse.Namespace, rules: Rules, trace: Trace) -> list[Setting]:
    if args.compare:
        return _checked(args.compare)
    block_tokens = rules.block_tokens(trace.id_tokens)
    found = args.blocks or _curve(trace, block_tokens)
    if args.device:
        block_bytes = block_tokens * args.bytes_per_token
        device, *lower = (room // block_bytes for room in (args.device, args.host, args.disk))
        if not device:
            raise Failure(f"--device is less than a block of {block_bytes:,} bytes", "settings")
        found = [_trimmed((device, *lower))]
    chosen = product(args.policy or [DEFAULT.name], found, args.store or [WriteThrough.name])
    return _checked([Setting(*one) for one in chosen])


def _checked(settings: list[Setting]) -> list[Setting]:
    for setting in settings:
        if setting.policy == PLAIN_FIFO and len(setting.blocks) > 1:
            raise Failure(
                f"{setting}: {PLAIN_FIFO} is one queue, without tiers below; {LEAF_FIFO} has them",
                "usage",
            )
    return settings


def _curve(trace: Trace, block_tokens: int) -> list[Capacity]:
    """Capacities from where a cache holds little more than a request to where it holds all."""
    blocks = [-(-record.num_tokens // block_tokens) for record in trace]
    least = max(blocks)
    limited = sorted({max(least, sum(blocks) // part) for part in _CURVE})
    return [*((size,) for size in limited), (UNLIMITED,)]


def _result(args: argparse.Namespace, trace: Trace, findings: Findings) -> dict[str, Any]:
    ceiling = findings.ceiling
    per_token = args.bytes_per_token
    result: dict[str, Any] = {
        "trace": {
            "format": trace.format_name,
            "requests": findings.num_requests,
            "measured_requests": ceiling.num_requests,
            "prompt_tokens": ceiling.num_tokens,
            "prompt_blocks": ceiling.num_blocks,
            "block_tokens": findings.block_tokens,
            "different_blocks": findings.num_blocks,
        },
        "unlimited": {"hit_tokens": ceiling.token_share, "hit_blocks": ceiling.block_share},
        "rows": rows(findings, per_token and per_token * findings.block_tokens),
        "left_out": list(_left_out(args, trace, findings)),
        "notes": trace.notes,
    }
    if args.per:
        result["groups"] = group_rows(findings, _TOP_GROUPS)
    return result


def _left_out(args: argparse.Namespace, trace: Trace, findings: Findings) -> Iterator[str]:
    if trace.id_tokens > 1 and args.partial == "unshared":
        yield "prompts' unfinished last blocks (no engine of full blocks finds them again)"
    if trace.id_tokens == 1:
        yield "in OPT and the cache without limit, parts of blocks (the server reuses them)"
    settings = [row.outcome.setting for row in findings.rows]
    if any(one.store == Gain.name and len(one.blocks) > 1 for one in settings):
        yield f"seconds: to move a block is taken to cost {MOVE_SHARE:g} of computing it (gain)"
    if any(one.policy == OPT and len(one.blocks) > 1 for one in settings):
        yield "a bound in tiers of opt: each tier has its own (of OPT: of one cache of all blocks)"
    if findings.num_answers < findings.num_requests:
        some = "the KV of answers" if not findings.num_answers else "the KV of some answers"
        yield f"{some} (their tokens are not in the trace)"
    if findings.num_requests > findings.ceiling.num_requests:
        num = findings.num_requests - findings.ceiling.num_requests
        yield f"the first {num:,} requests (--warmup)"


def _lines(result: dict[str, Any]) -> Iterator[str]:
    of, unlimited = result["trace"], result["unlimited"]
    yield (
        f"{of['measured_requests']:,} requests, {of['prompt_tokens']:,} prompt tokens in "
        f"{of['prompt_blocks']:,} blocks of {of['block_tokens']}; a cache without limit reuses "
        f"{unlimited['hit_tokens']:.2%} of the tokens, {unlimited['hit_blocks']:.2%} of the blocks"
    )
    yield ""
    found = result["rows"]
    shown = {
        name: text
        for name, text in _HEADINGS.items()
        if name in _ALWAYS or any(row.get(name) for row in found)
    }
    yield from table(found, shown)
    if groups := result.get("groups"):
        yield from ("", "The largest, and the share of their tokens that was reused, in %:")
        named = [{**group, "name": group["name"] or "(unnamed)"} for group in groups]
        yield from table(named, {name: name for name in groups[0]})
    yield ""
    if result["left_out"]:
        yield f"Left out: {'; '.join(result['left_out'])}."
    for row in found:
        if row["refused_requests"]:
            yield (
                f"{row['refused_requests']:,} requests are longer than the {row['blocks']:,} "
                f"blocks of {row['policy']}: counted, with nothing reused."
            )
    yield from (f"{note}." for note in result["notes"])


def _plot(findings: Findings, path: Path) -> None:
    curves: dict[str, dict[float, float]] = {}
    for row in findings.rows:
        capacity = row.outcome.setting.bound.blocks[0]
        if capacity is not UNLIMITED:
            name = row.outcome.setting.policy
            curves.setdefault(name, {})[capacity] = row.outcome.total.token_share
            curves.setdefault(OPT, {})[capacity] = row.bound.token_share
    unit = f"blocks of {findings.block_tokens} tokens, all tiers together"
    plots.plot_hit_rates(curves, findings.ceiling.token_share, unit, path)


def _policy(name: str) -> str:
    if name not in POLICY_NAMES:
        raise argparse.ArgumentTypeError(
            f"no policy {name!r} is built; there are {', '.join(POLICY_NAMES)}"
        )
    return name


def _store(name: str) -> str:
    if name not in PLACEMENTS:
        raise argparse.ArgumentTypeError(
            f"there is no store={name}; it may be {', '.join(PLACEMENTS)}"
        )
    return name


def _capacity(word: str) -> Capacity:
    """Of "1409", "1000+5000+30000" or "unlimited"."""
    parts = word.split("+")
    if (
        len(parts) > len(TIERS)
        or not all(part == ENDLESS or re.fullmatch(r"[0-9]{1,12}", part) for part in parts)
        or parts[0].strip("0") == ""
    ):
        raise argparse.ArgumentTypeError(
            f"{word!r} is no capacity: write it as 1409, as 1000+5000+30000 (device, host, disk) "
            f"or {ENDLESS}"
        )
    return _trimmed(tuple(UNLIMITED if part == ENDLESS else int(part) for part in parts))


def _trimmed(capacity: Capacity) -> Capacity:
    """Without empty tiers at its end."""
    return _trimmed(capacity[:-1]) if capacity[-1] == 0 else capacity
