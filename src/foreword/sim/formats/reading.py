"""What all formats share: what a reader is given and gives, and how it reads a record's fields."""

import math
import random
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from foreword.sim.ids import Ids, IdSpace, words
from foreword.sim.pieces import Bad
from foreword.sim.text import TEXT_BYTES_PER_TOKEN, Tokenize, Tokens
from foreword.sim.trace import Record

MEDIA: Final = "<|media "  # begins a segment that stands for an image, a sound or a file
_ESTIMATED = (
    f"{TEXT_BYTES_PER_TOKEN} bytes of text count as a token in {{n}} prompts: an estimate; a "
    "tokenizer gives the model's own"
)
_DRAWN = (
    "{n} sessions have no clock in common: their starts are drawn at random, so how they "
    "interleave is the experimenter's choice"
)


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


@dataclass(frozen=True, slots=True)
class Said:
    """What a log says of a request besides its text."""

    arrival_s: float = 0.0
    session: str = ""
    tenant: str = ""
    num_tokens: int | None = None  # of the prompt
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    ttft_s: float | None = None


class Reading:
    """What the readers of one trace share."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.ids = IdSpace()
        self.tokens = Tokens(options.tokenize)
        self.notes: Counter[str] = Counter()  # texts with {n} for how often
        self.in_order = True  # False: requests are not read in the order in which they came
        self._starts = random.Random(options.seed)
        self._num_said = self._num_made = 0  # prompt tokens where a log counts them

    def all_notes(self) -> Iterator[str]:
        """What the reader of a figure from the trace should know."""
        for note, num in self.notes.items():
            if num:
                yield note.format(n=num)
        if self._num_said:
            yield (
                f"the log counts {self._num_said} prompt tokens where its text gives "
                f"{self._num_made}; cached tokens keep their share"
            )

    def token_record(self, ids: Ids, output_ids: Ids, said: Said) -> Record:
        """A request whose token ids the log has. Raises Bad where it contradicts itself."""
        if not len(ids):
            raise Bad("its prompt is empty")
        if said.num_tokens not in (None, len(ids)):
            raise Bad(f"{len(ids)} token ids, and it counts {said.num_tokens}")
        return self._record(words(ids), words(output_ids), said)

    def text_record(self, prompt: Sequence[str], answer: Sequence[str], said: Said) -> Record:
        """A request whose text the log has, in segments. Raises Bad."""
        ids = self.tokens.ids(prompt)
        if not ids:
            raise Bad("its prompt is empty")
        if self.tokens.estimated:
            self.notes[_ESTIMATED] += 1
        num_media = sum(segment.startswith(MEDIA) for segment in prompt)
        if num_media:
            self.notes["{n} images, sounds or files count as the few tokens of their name"] += (
                num_media
            )
        cached = None
        if said.num_tokens:
            self._num_said += said.num_tokens
            self._num_made += len(ids)
            if said.num_cached_tokens is not None:
                if said.num_cached_tokens > said.num_tokens:
                    raise Bad(
                        f"{said.num_cached_tokens} cached tokens of a prompt of {said.num_tokens}"
                    )
                cached = round(said.num_cached_tokens / said.num_tokens * len(ids))
        said = replace(said, num_cached_tokens=cached)
        return self._record(ids, self.tokens.ids(answer), said)

    def _record(self, ids: "array[int]", output_ids: "array[int]", said: Said) -> Record:
        return Record(
            len(ids),
            ids,
            1,
            said.arrival_s,
            len(output_ids) or said.num_output_tokens or 0,
            output_ids,
            said.session,
            said.tenant,
            said.num_cached_tokens,
            said.ttft_s,
        )

    def start_s(self) -> float:
        """When a session begins that has no clock in common with others."""
        self.in_order = False
        self.notes[_DRAWN] += 1
        return self._starts.uniform(0, self.options.spread_s)


class Reader(ABC):
    """Reads one trace, record by record."""

    @abstractmethod
    def read(self, item: Mapping[str, Any]) -> Iterable[Record | Lengths]:
        """The requests that one record of the file tells of. Raises Bad."""

    def end(self) -> Iterable[Record | Lengths]:
        """The requests that are still to come after the last record. Raises Bad."""
        return ()


@dataclass(frozen=True)
class Format:
    """`matches`: is a record of this format? `is_header` is the same for a CSV file's columns, and
    `line` for one of a log's lines, from which it makes a record; None where it has none."""

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    reader: Callable[[Reading], Reader]
    is_header: Callable[[Sequence[str]], bool] = lambda names: False
    line: Callable[[str], Mapping[str, Any] | None] | None = None
