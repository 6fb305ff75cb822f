"""`foreword whatif` and `foreword cache worth`: what a running server's cache would find with
other sizes, and whom it serves."""

import argparse
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from foreword.cli.client import Client
from foreword.cli.failure import Failure
from foreword.sim.tables import Row, table

PATHS = {"whatif": "/cache/whatif", "cache worth": "/cache/worth"}
SHOWN = {
    "shared": "tokens shared",
    "reuses": "reuses",
    "computed": "computing s",
    "restored": "loading s",
    "penalty": "penalty s",
    "worth": "worth it",
    "held": "holds",
}
_NOTHING = 0.005  # of what is saved: a smaller difference counts as none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")


def run(args: argparse.Namespace) -> dict[str, Any] | str:
    """The API key of a server that asks for one is taken from OPENAI_API_KEY. Raises Failure where
    the server is not there."""
    client = Client(args.url, os.environ.get("OPENAI_API_KEY"))
    try:
        found = dict(json.loads(client.read("GET", PATHS[args.command])))
    except OSError as error:
        raise Failure(f"no server answers at {args.url}: {error}", "failed") from error
    if args.json:
        return found
    return "\n".join(what_if(found) if args.command == "whatif" else worth(found))


def what_if(found: Mapping[str, Any]) -> list[str]:
    """Lines for people: what was seen, a table, a sentence or two for each place."""
    if not found["asked_blocks"]:
        return [_NOBODY]
    now, one_in = found["now"], found["sampled_1_in"]
    asked, block = f"{found['asked_blocks']:,.0f}", found["block_tokens"]
    lines = [
        f"{_span(found['window_s'])}: prompts with {asked} full blocks of {block} tokens, of which "
        f"{_percent(now['hit_rate'])} were found. "
        + (f"One in {one_in} is followed." if one_in > 1 else "All are followed."),
        "",
    ]
    places = list(now["by_place"])
    columns = {"size": "with", **{name: f"found in {name}" for name in places}}
    columns |= {"all": "found", "saved": "saved s/day"}
    rows: list[Row] = [
        {
            "size": f"{row['place']} {_bytes(row['bytes'])}{' (now)' * (row['times'] == 1)}",
            **{name: _percent(rate) for name, rate in row["by_place"].items()},
            "all": _percent(row["hit_rate"]),
            "saved": _seconds(row["saved_s_per_day"]),
        }
        for row in found["rows"]
    ]
    lines += [*table(rows, columns), ""]
    for place in places:
        of_place = {row["times"]: row for row in found["rows"] if row["place"] == place}
        lines += _sentences(place, of_place, now)
        if found["load_block_s"][place] is None:
            lines.append(f"Loading from the {place} was not measured yet: it counts as free.")
    return lines


def _sentences(
    place: str, rows: Mapping[float, Mapping[str, Any]], now: Mapping[str, Any]
) -> list[str]:
    """What more room there would bring, and what its absence would cost."""
    double = rows[2]
    more = _gained(double, now)
    brings = "saving no more" if not more else f"saving {_seconds(more)} s of computing a day more"
    if more is None:
        brings = "what that saves is not measured yet"
    added = _bytes(double["bytes"] - rows[1]["bytes"])
    rate, before = _percent(double["hit_rate"]), _percent(now["hit_rate"])
    said = [
        f"With {added} more on the {place} the hit rate would be {rate} ({before} now), {brings}."
    ]
    if place == "device":
        return said  # there is no server without it
    lost = _gained(now, rows[0])
    if lost is None:
        return said
    if not lost:
        return [*said, f"Without the {place} you would lose nothing."]
    if lost < 0:
        gain = f"gain {_seconds(-lost)} s a day: loading from it takes longer than computing"
        return [*said, f"Without the {place} you would {gain}."]
    return [*said, f"Without the {place} you would lose {_seconds(lost)} s of computing a day."]


def _gained(row: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Seconds a day that a row saves more than another; 0 for what is next to nothing."""
    saved, less = row["saved_s_per_day"], other["saved_s_per_day"]
    if saved is None or less is None:
        return None
    gained = float(saved - less)
    return gained if abs(gained) > _NOTHING * max(abs(saved), abs(less)) else 0.0


def worth(found: Mapping[str, Any]) -> list[str]:
    """A table for each dimension."""
    if not found["tenants"]:
        return [_NOBODY]
    lines = [f"{_span(found['window_s'])}, saved by reuse:"]
    for dimension, heading in (
        ("tenants", "tenant"),
        ("documents", "document (prompt_cache_key)"),
        ("segments", "segment"),
    ):
        rows: list[Row] = [
            {"name": _name(dimension, row), **_judged(row)} for row in found[dimension]
        ]
        if rows:
            lines += ["", *table(rows, {"name": heading, **SHOWN})]
    return [
        *lines,
        "",
        "Worth it: computing the shared tokens would have taken longer than loading them",
        "and the penalty together: what others would have found in the room that it holds.",
    ]


def _name(dimension: str, row: Mapping[str, Any]) -> str:
    if dimension == "tenants":
        return row["tenant"] or "(no key, no salt)"
    if dimension == "documents":
        return str(row["document"])
    text = "(salted)" if row["text"] is None else re.sub(r"<\|.*?\|>", " ", row["text"])
    return f"{row['start']:,}-{row['stop']:,} {' '.join(text.split())[:50]}"


def _judged(row: Mapping[str, Any]) -> Row:
    known = row["worth_it"] is not None
    rate = row["bytes_per_s"]
    restore_s = row["restore_bytes"] / rate if rate else 0.0
    return {
        "shared": f"{row['tokens_shared']:,.0f}",
        "reuses": f"{row['reuse_count']:,.0f}",
        "computed": _seconds(row["tokens_shared"] * row["prefill_s_per_token"] if known else None),
        "restored": _seconds(restore_s),
        "penalty": _seconds(row["eviction_penalty_s"]),
        "worth": {True: "yes", False: "no", None: "?"}[row["worth_it"]],
        "held": ", ".join(f"{_bytes(num)} {place}" for place, num in row["held_bytes"].items()),
    }


_NOBODY = "No request has ended since the server's start."


def _span(window_s: float) -> str:
    for unit_s, unit in ((3600, "hours"), (60, "minutes")):
        if window_s >= 2 * unit_s:
            return f"In the last {window_s / unit_s:.0f} {unit}"
    return f"In the last {window_s:.0f} seconds"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(seconds: float | None) -> str:
    return (
        "?" if seconds is None else f"{seconds:,.3g}" if abs(seconds) < 1000 else f"{seconds:,.0f}"
    )


def _bytes(num: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num >= size:
            return f"{num / size:{',.0f' if num >= 100 * size else '.3g'}} {unit}"
    return f"{num:.0f} B"
