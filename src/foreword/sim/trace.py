"""Record: one request as a trace tells it. Trace: many, in the order of their arrival.

The ids lie in a temporary file, so that a long trace takes little memory.
"""

import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

_ID_BYTES = 4


class TraceError(Exception):
    """A trace, or a line of it, that no figure may come from. The message is for its reader."""


@dataclass(frozen=True, slots=True)
class Record:
    """`ids` are those of the prompt's tokens where `id_tokens` is 1; else one for each `id_tokens`
    tokens, the last for what is left of them. They lie below 2**32 and mean the same to all
    requests of one `tenant`; tenants share nothing."""

    num_tokens: int  # of the prompt, from 1
    ids: Sequence[int]
    id_tokens: int = 1
    arrival_s: float = 0.0  # from the trace's first
    num_output_tokens: int = 0
    output_ids: Sequence[int] = ()  # tokens of the answer; empty where the trace has none
    session: str = ""
    tenant: str = ""
    num_cached_tokens: int | None = None  # of the prompt, as was observed
    ttft_s: float | None = None  # as was observed
    place: int = 0  # in the order of arrival; a Trace sets it
    total_s: float | None = None  # from its arrival to the end of its answer, as was observed
    rest_s: float = 0.0  # and from there to when the engine took in other requests
    # Where it had several samples: how many of `output_ids` each has, one sample after the other.
    sample_lengths: Sequence[int] = ()
    wants_prompt: bool = False  # its prompt's logits were wanted, so nothing of it was reused
    # Of a request whose client left before the first token: prompt tokens that had KV by then.
    cancelled_at: int | None = None

    @property
    def answers(self) -> list[Sequence[int]]:
        """`output_ids` of each sample; at least one, which may be empty."""
        ends = list(accumulate(self.sample_lengths))
        if not ends:
            return [self.output_ids]
        return [self.output_ids[start:end] for start, end in pairwise([0, *ends])]


class Span(NamedTuple):
    """When a request came and, where that was observed, when its answer ended, from the first
    arrival on; and for how long its engine went on before it took in other requests."""

    came_s: float
    ended_s: float | None
    rest_s: float


class Trace:
    """Records whose ids have one size. Add all, then read them as often as wanted."""

    def __init__(self, id_tokens: int, format_name: str = "") -> None:
        """`format_name` is that of the file the records come from."""
        self.id_tokens = id_tokens
        self.format_name = format_name
        self.notes: list[str] = []  # what a reader of any figure from it should know
        self._ids = tempfile.TemporaryFile(buffering=1 << 16)  # noqa: SIM115 - closed by `close`
        self._offsets = array("q", (0,))  # of ids; a prompt's, then its answer's
        self._num_tokens = array("q")
        self._num_output_tokens = array("q")
        self._num_cached_tokens = array("q")  # -1: not observed
        self._arrivals_s = array("d")
        self._ttfts_s = array("d")  # -1: not observed
        self._totals_s = array("d")  # the same
        self._rests_s = array("d")
        # What few records have, by place.
        self._rare: dict[int, tuple[Sequence[int], bool, int | None]] = {}
        self._names: dict[str, int] = {}
        self._sessions = array("l")
        self._tenants = array("l")
        self._order: Sequence[int] = ()
        self._spelled: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._ids.close()

    def __len__(self) -> int:
        return len(self._num_tokens)

    def add(self, record: Record) -> None:
        """Raises TraceError where its ids have another size than the trace's, or another number
        than its tokens need."""
        if record.id_tokens != self.id_tokens:
            raise TraceError(
                f"an id stands for {record.id_tokens} tokens here and for {self.id_tokens} before"
            )
        if len(record.ids) != -(-record.num_tokens // self.id_tokens) or record.num_tokens < 1:
            raise TraceError(
                f"{record.num_tokens} tokens and {len(record.ids)} ids of {self.id_tokens} each"
            )
        for ids in (record.ids, record.output_ids):
            self._ids.write(memoryview(array("I", ids)))
            self._offsets.append(self._offsets[-1] + len(ids))
        self._num_tokens.append(record.num_tokens)
        self._num_output_tokens.append(record.num_output_tokens)
        cached, ttft_s = record.num_cached_tokens, record.ttft_s
        self._num_cached_tokens.append(-1 if cached is None else cached)
        self._arrivals_s.append(record.arrival_s)
        self._ttfts_s.append(-1.0 if ttft_s is None else ttft_s)
        self._totals_s.append(-1.0 if record.total_s is None else record.total_s)
        self._rests_s.append(record.rest_s)
        if record.sample_lengths or record.wants_prompt or record.cancelled_at is not None:
            rare = tuple(record.sample_lengths), record.wants_prompt, record.cancelled_at
            self._rare[len(self) - 1] = rare
        for name, column in ((record.session, self._sessions), (record.tenant, self._tenants)):
            column.append(self._names.setdefault(name, len(self._names)))
        self._order = ()

    def __iter__(self) -> Iterator[Record]:
        """By arrival; of those that arrived together, as they were added."""
        return map(self.__getitem__, range(len(self)))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt and its answers together, by arrival."""
        return [self._num_tokens[at] + self._num_output_tokens[at] for at in self._sorted()]

    @property
    def spans(self) -> list[Span]:
        """Of all requests, by arrival."""
        order = self._sorted()
        first_s = self._arrivals_s[order[0]] if order else 0.0
        found = ((self._arrivals_s[at] - first_s, self._totals_s[at], at) for at in order)
        return [
            Span(came_s, None if total_s < 0 else came_s + total_s, self._rests_s[at])
            for came_s, total_s, at in found
        ]

    def __getitem__(self, place: int) -> Record:
        """The record at this place in the order of arrival, from 0."""
        at = self._sorted()[place]
        cached, ttft_s = self._num_cached_tokens[at], self._ttfts_s[at]
        total_s = self._totals_s[at]
        return Record(
            self._num_tokens[at],
            self._read(2 * at),
            self.id_tokens,
            self._arrivals_s[at] - self._arrivals_s[self._order[0]],
            self._num_output_tokens[at],
            self._read(2 * at + 1),
            self._spelled[self._sessions[at]],
            self._spelled[self._tenants[at]],
            None if cached < 0 else cached,
            None if ttft_s < 0 else ttft_s,
            place,
            None if total_s < 0 else total_s,
            self._rests_s[at],
            *self._rare.get(at, ((), False, None)),
        )

    def _sorted(self) -> Sequence[int]:
        if len(self._order) != len(self):
            self._order = sorted(range(len(self)), key=self._arrivals_s.__getitem__)
            self._spelled = tuple(self._names)
        return self._order

    def _read(self, part: int) -> "array[int]":
        start, stop = self._offsets[part], self._offsets[part + 1]
        ids = array("I")
        if start < stop:
            self._ids.seek(start * _ID_BYTES)
            ids.frombytes(self._ids.read((stop - start) * _ID_BYTES))
        return ids
