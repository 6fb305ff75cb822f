"""What all formats share: what a reader is given and gives, and how it reads a record's fields."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from foreword.sim.ids import IdSpace
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record

Tokenize = Callable[[str], Sequence[int]]

_COUNT_MAX: Final = 2**31  # more tokens are no request's


@dataclass(frozen=True)
class ReadOptions:
    """How a trace is read. `block_size`: tokens of one id, where the trace does not say it."""

    format_name: str | None = None  # None: by the first record
    tokenize: Tokenize | None = None  # None: 4 bytes of text count as a token
    on_bad: str = "error"  # or "skip"
    block_size: int | None = None
    coarsen: int | None = None  # tokens of one id afterwards
    spread_s: float = 86400.0  # sessions without a common clock start within it, uniformly
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what no trace can be read with."""
        if self.on_bad not in ("error", "skip"):
            raise ValueError(f"on_bad is 'error' or 'skip', not {self.on_bad!r}")
        for name, size in (("block_size", self.block_size), ("coarsen", self.coarsen)):
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}, not from 1")
        if not 0 <= self.spread_s < math.inf:
            raise ValueError(f"spread_s is {self.spread_s}, not from 0")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A request of which only the lengths are known: when it came, not what it shares."""

    num_tokens: int
    arrival_s: float = 0.0
    num_output_tokens: int = 0
    session: str = ""


@dataclass
class Reading:
    """What the readers of one trace share."""

    options: ReadOptions
    ids: IdSpace = field(default_factory=IdSpace)
    notes: Counter[str] = field(default_factory=Counter)  # texts with {n} for how often
    clocked: bool = True  # False: the arrivals of sessions are drawn, not read

    def __post_init__(self) -> None:
        self._starts = random.Random(self.options.seed)

    def start_s(self) -> float:
        """When a session begins that has no clock in common with others."""
        self.clocked = False
        return self._starts.uniform(0, self.options.spread_s)


class Reader(Protocol):
    """Reads one trace, record by record."""

    def read(self, item: Mapping[str, Any]) -> Iterable[Record | Lengths]:
        """The requests that one record of the file tells of. Raises Bad."""
        ...


@dataclass(frozen=True)
class Format:
    """`matches`: is a record of this format? `is_header` is the same for a CSV file's columns, and
    `line` for one of a log's lines, from which it makes a record; None where it has none."""

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    reader: Callable[[Reading], Reader]
    is_header: Callable[[Sequence[str]], bool] = lambda names: False
    line: Callable[[str], Mapping[str, Any] | None] | None = None


def first_of(item: Mapping[str, Any], *names: str) -> Any:
    """The value of the first name that has one; None where none has."""
    return next((item[name] for name in names if item.get(name) is not None), None)


def count(item: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """A whole number from 0. Raises Bad, also where there is none and no default."""
    found = first_of(item, *names)
    if found is None:
        if default is None:
            raise Bad(f"there is no {' or '.join(names)}")
        return default
    if type(found) is not int or not 0 <= found < _COUNT_MAX:
        raise Bad(f"{_name(item, names)} is {_shown(found)}, not a whole number from 0")
    return found


def prompt_tokens(item: Mapping[str, Any], *names: str) -> int:
    """The length of a prompt. Raises Bad where it is empty."""
    found = count(item, *names)
    if found == 0:
        raise Bad("its prompt is empty")
    return found


def number(item: Mapping[str, Any], *names: str) -> float | None:
    """A finite number. Raises Bad."""
    found = first_of(item, *names)
    if found is None:
        return None
    if type(found) not in (int, float) or not abs(found) < 1e300:
        raise Bad(f"{_name(item, names)} is {_shown(found)}, not a number")
    return float(found)


def text(item: Mapping[str, Any], *names: str) -> str:
    """A name: a string, or a number as one. "" where there is none. Raises Bad."""
    found = first_of(item, *names)
    if found is None:
        return ""
    if type(found) not in (str, int):
        raise Bad(f"{_name(item, names)} is {_shown(found)}, not a string")
    return str(found)


def mapping(item: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """An object; an empty one where there is none. Raises Bad."""
    found = first_of(item, *names)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Bad(f"{_name(item, names)} is {_shown(found)}, not an object")
    return found


def objects(item: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    """A list of objects; an empty one where there is none. Raises Bad."""
    found = first_of(item, *names)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise Bad(f"{_name(item, names)} is {_shown(found)}, not a list of objects")
    return found


def _name(item: Mapping[str, Any], names: Sequence[str]) -> str:
    return next(name for name in names if item.get(name) is not None)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
