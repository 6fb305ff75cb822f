"""A trace as a command is given it: its file, how it is read, and how far its replay is."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from foreword.cli.failure import Failure
from foreword.cli.settings import count
from foreword.sim.formats.reading import ReadOptions
from foreword.sim.importer import read_trace
from foreword.sim.trace import Trace, TraceError


def add_trace_flags(parser: argparse.ArgumentParser, name: str = "trace") -> None:
    """`name`: an operand's, or an option's."""
    parser.add_argument(
        name, metavar="TRACE", help="a file, plain or packed, a folder of them, or - for stdin"
    )
    parser.add_argument("--format", help="of the trace (what its first record looks like)")
    parser.add_argument(
        "--bad-lines",
        default="error",
        choices=("error", "skip"),
        help="whether a line that is wrong ends it, or is left out and counted",
    )
    parser.add_argument(
        "--coarsen", type=count, metavar="TOKENS", help="make each block of ids stand for so many"
    )
    parser.add_argument(
        "--block-size",
        type=count,
        metavar="TOKENS",
        help="of a block, for traces that do not say it (16 for those of token ids)",
    )


def opened_trace(args: argparse.Namespace) -> Trace:
    """The trace that the flags name. Raises Failure."""
    options = ReadOptions(
        args.format, on_bad=args.bad_lines, block_size=args.block_size, coarsen=args.coarsen
    )
    try:
        return read_trace(sys.stdin.buffer if args.trace == "-" else Path(args.trace), options)
    except TraceError as error:
        raise Failure(str(error), "failed") from error
    except OSError as error:
        raise Failure(
            f"{args.trace} cannot be read: {error.strerror or error}", "failed"
        ) from error


def progress_bar() -> Callable[[float], None]:
    """A line on the terminal, if there is one, that goes when all is done."""
    if not sys.stderr.isatty():
        return lambda _share: None
    shown = -1

    def show(share: float) -> None:
        nonlocal shown
        percent = int(100 * share)
        if percent != shown:
            shown = percent
            bar = "#" * (percent // 4)
            text = f"\rreplaying [{bar:25}] {percent:3} %" if percent < 100 else "\r\x1b[K"
            print(text, end="", file=sys.stderr, flush=True)

    return show
