"""A trace as a command is given it: its file, how it is read, and how far its replay is."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, TypeVar

from foreword.cli.failure import Failure
from foreword.cli.settings import count
from foreword.sim.formats import FORMATS
from foreword.sim.formats.reading import ReadOptions
from foreword.sim.importer import read_trace
from foreword.sim.trace import Trace, TraceError

T = TypeVar("T")


def add_trace_flags(parser: argparse.ArgumentParser, name: str = "trace") -> None:
    """`name`: an operand's, or an option's."""
    parser.add_argument(
        name, metavar="TRACE", help="a file, plain or packed, a folder of them, or - for stdin"
    )
    parser.add_argument(
        "--format",
        choices=[one.name for one in FORMATS],
        help="of the trace (what its first record looks like)",
    )
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
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json of the model, or the folder it is in, for traces of text (4 bytes "
        "count as a token)",
    )
    parser.add_argument(
        "--spread",
        type=seconds,
        default=86400.0,
        metavar="SECONDS",
        help="sessions without a common clock start within so many, at random",
    )
    parser.add_argument("--seed", type=int, default=0, help="of these starts")


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0")
    return found


def read_options(args: argparse.Namespace) -> ReadOptions:
    """How the flags say that a trace is read. Raises Failure."""
    return ReadOptions(
        args.format,
        None if args.tokenizer is None else tokenizer(args.tokenizer),
        args.bad_lines,
        args.block_size,
        args.coarsen,
        args.spread,
        args.seed,
    )


def tokenizer(path: Path) -> Callable[[str], Sequence[int]]:
    """Makes token ids of text, without special tokens of its own. Raises Failure."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise Failure(f"--tokenizer {path}: there is no {file}", "settings")
    tokenizers = import_module("tokenizers")  # an extra
    try:
        loaded = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise Failure(f"--tokenizer {file} cannot be read: {error}", "settings") from error
    loaded.no_truncation()
    loaded.no_padding()

    def token_ids(text: str) -> Sequence[int]:
        ids: Sequence[int] = loaded.encode(text, add_special_tokens=False).ids
        return ids

    return token_ids


def source(args: argparse.Namespace) -> Path | BinaryIO:
    """Raises Failure where there is no standard input."""
    if args.trace != "-":
        return Path(args.trace)
    if sys.stdin is None:
        raise Failure("standard input is closed: name a file", "usage")
    return sys.stdin.buffer


def opened_trace(args: argparse.Namespace) -> Trace:
    """The trace that the flags name. Raises Failure."""
    return told(args, lambda: read_trace(source(args), read_options(args)))


def told(args: argparse.Namespace, read: Callable[[], T]) -> T:
    """What `read` gives; what is wrong with the trace as a Failure."""
    try:
        return read()
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


def written(path: Path, write: Callable[[Path], None]) -> None:
    """Write a result to a file. Raises Failure."""
    try:
        write(path)
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror or error}", "failed") from error
