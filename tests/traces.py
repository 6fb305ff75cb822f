"""Trace files for tests: a few lines, or the public ones where they lie beside the checkout."""

import io
import json
from pathlib import Path

import pytest

from foreword.sim.importer import ReadOptions, read_trace

SHARED = Path(__file__).parents[2] / "shared" / "traces"


def shared(name):
    """A public trace."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} does not lie beside the checkout, in ../shared/traces")
    return path


def stream(*lines):
    """A file of these lines: text as it is, anything else as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return io.BytesIO("".join(f"{text}\n" for text in texts).encode())


def read(*lines, **options):
    """The trace that a file of these lines is."""
    return read_trace(stream(*lines), ReadOptions(**options))


def ids(trace):
    return [list(record.ids) for record in trace]


def records(*lines, **options):
    """What the trace holds that a file of these lines is, and its notes."""
    with read(*lines, **options) as trace:
        return list(trace), trace.notes
