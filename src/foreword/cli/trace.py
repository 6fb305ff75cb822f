"""`foreword trace show`: what is in a trace. `foreword trace anonymise`: the same trace without
text, token ids and names."""

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foreword.cli.failure import Failure
from foreword.cli.traces import add_trace_flags, opened_trace, read_options, source, told
from foreword.sim.anonymise import anonymous_lines
from foreword.sim.formats.reading import Lengths
from foreword.sim.importer import NoPrefixes, read_lengths, read_trace
from foreword.sim.summary import Repeats, Summary, summary
from foreword.sim.trace import Trace

_BLOCK_SIZE = 16  # of traces of token ids; the server's own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_flags(parser)
    if parser.get_default("command") == "trace show":
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
    else:
        parser.add_argument(
            "-o",
            "--output",
            required=True,
            metavar="FILE",
            help="where it goes, packed where the name ends in .gz; - for stdout",
        )


def run(args: argparse.Namespace) -> int:
    """Raises Failure for what is no trace, and where the result cannot be written."""
    if args.command == "trace anonymise":
        return _anonymise(args)
    shown = told(args, lambda: _show(args))
    print(json.dumps(shown, indent=2) if args.json else "\n".join(_lines(shown)), flush=True)
    return 0


def _show(args: argparse.Namespace) -> dict[str, Any]:
    try:
        trace = read_trace(source(args), read_options(args))
    except NoPrefixes as reason:
        if args.trace == "-":  # it cannot be read again
            raise
        return _arrivals(read_lengths(source(args), read_options(args)), str(reason))
    with trace:
        return _found(trace, summary(trace, args.block_size or _BLOCK_SIZE))


def _found(trace: Trace, found: Summary) -> dict[str, Any]:
    repeats = found.repeats
    return {
        "format": trace.format_name,
        "requests": found.num_requests,
        "sessions": found.num_sessions,
        "tenants": found.num_tenants,
        "span_s": found.span_s,
        "prompt_tokens": found.num_prompt_tokens,
        "longest_prompt": found.longest_prompt,
        "output_tokens": found.num_output_tokens,
        "tokens_per_id": trace.id_tokens,
        "ids_name": _named(trace, repeats),
        "block_tokens": repeats and repeats.block_tokens,
        "different_blocks": repeats and repeats.num_different_blocks,
        "repeated_blocks": repeats and repeats.block_share,
        "repeated_tokens": found.repeated_share,
        "observed_requests": found.num_observed,
        "observed_cached_tokens": found.cached_share,
        "notes": trace.notes,
    }


def _named(trace: Trace, repeats: Repeats | None) -> str:
    """What an id is the name of."""
    if trace.id_tokens == 1:
        return "tokens"
    if repeats is None:
        return "blocks"
    return "prefixes" if repeats.has_prefix_ids else "contents of blocks, not prefixes"


def _arrivals(found: Sequence[Lengths], reason: str) -> dict[str, Any]:
    return {
        "requests": len(found),
        "sessions": len({one.session for one in found} - {""}),
        "span_s": found[-1].arrival_s - found[0].arrival_s if found else 0.0,
        "prompt_tokens": sum(one.num_tokens for one in found),
        "longest_prompt": max((one.num_tokens for one in found), default=0),
        "output_tokens": sum(one.num_output_tokens for one in found),
        "notes": [reason],
    }


def _lines(shown: dict[str, Any]) -> Iterator[str]:
    for name, value in shown.items():
        if name != "notes":
            yield f"{name:<24}{_figure(value)}"
    yield from (f"note: {note}" for note in shown["notes"])


def _figure(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _anonymise(args: argparse.Namespace) -> int:
    with opened_trace(args) as trace:
        lines = anonymous_lines(trace, args.block_size or _BLOCK_SIZE)
        if args.output == "-":
            for line in lines:
                print(line)
        else:
            _write(lines, Path(args.output))
        for note in trace.notes:
            print(f"note: {note}", file=sys.stderr)
    return 0


def _write(lines: Iterator[str], path: Path) -> None:
    """All of them or no file; what is there and no file, such as a pipe, gets them as they come."""
    if path.is_dir() or not path.name:
        raise Failure(f"{path} is a folder: name a file in it", "usage")
    direct = path.is_symlink() or (path.exists() and not path.is_file())
    unfinished = path if direct else path.with_name(f"{path.name}.part")
    try:
        try:
            opener = gzip.open if path.suffix == ".gz" else open
            with opener(unfinished, "wt", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
            if not direct:
                unfinished.replace(path)
        finally:
            if not direct:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror or error}", "failed") from error
