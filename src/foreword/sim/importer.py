"""Traces from files: finds out the format, reads it piece by piece, says in which line it is wrong.

`read_trace` is for what follows prefixes, `read_lengths` for what needs arrivals and lengths alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from foreword.sim.formats import FORMATS
from foreword.sim.formats.reading import Format, Lengths, Reader, Reading, ReadOptions
from foreword.sim.ids import Coarsening
from foreword.sim.pieces import Bad, Piece, Pieces, parsed
from foreword.sim.trace import Record, Trace, TraceError

_NUM_BAD_SHOWN = 3


class NoPrefixes(TraceError):
    """A trace of lengths alone: it does not say which prompts begin alike, so no hit rate may come
    of it. `read_lengths` reads it."""


def read_trace(source: Path | BinaryIO, options: ReadOptions | None = None) -> Trace:
    """The requests of a file, of all files in a folder, or of a stream. Raises TraceError, which
    names file and line; NoPrefixes; OSError."""
    importing = _Importing(options or ReadOptions())
    trace: Trace | None = None
    try:
        for record in importing.requests(source):
            assert isinstance(record, Record)
            if trace is None:
                trace = Trace(record.id_tokens, importing.format_name)
            trace.add(record)
        if trace is None:
            empty = TraceError(f"{importing.file}: there is no request in it")
            raise importing.no_prefixes or empty
        trace.notes = list(importing.notes())
    except BaseException:
        if trace is not None:
            trace.close()
        raise
    return trace


def read_lengths(source: Path | BinaryIO, options: ReadOptions | None = None) -> list[Lengths]:
    """The same, without what the prompts share, by arrival. Raises as read_trace, without
    NoPrefixes."""
    importing = _Importing(options or ReadOptions(), lengths=True)
    found = [_lengths(record) for record in importing.requests(source)]
    return sorted(found, key=lambda lengths: lengths.arrival_s)


def _lengths(record: Record | Lengths) -> Lengths:
    if isinstance(record, Lengths):
        return record
    return Lengths(record.num_tokens, record.arrival_s, record.num_output_tokens, record.session)


class _Importing:
    """One trace on its way in. `file` and `place` say how far it is."""

    def __init__(self, options: ReadOptions, *, lengths: bool = False) -> None:
        self._options = options
        self._lengths = lengths  # are they enough?
        self._id_tokens: int | None = None
        self._reading = Reading(options)
        self._coarsening = None if options.coarsen is None else Coarsening(options.coarsen)
        self._format: Format | None = None
        self._reader: Reader | None = None
        self._num_unread = 0  # lines before the format is known, of none that is
        self._unread: tuple[Bad, str] | None = None  # the first of them, and where
        self._bad: list[str] = []  # the first ones
        self._num_bad = 0
        self._num_earlier = 0
        self.no_prefixes: NoPrefixes | None = None  # where the first request has lengths alone
        self.file = self.place = ""

    @property
    def format_name(self) -> str:
        return self._format.name if self._format else ""

    def requests(self, source: Path | BinaryIO) -> Iterator[Record | Lengths]:
        latest_s = float("-inf")
        for record in chain(chain.from_iterable(map(self._file, _files(source))), self._end()):
            self._num_earlier += record.arrival_s < latest_s
            latest_s = max(latest_s, record.arrival_s)
            yield record

    def _end(self) -> Iterator[Record | Lengths]:
        if self._format is None:
            self._refuse_unread()
        if self._reader is not None:
            yield from self._made(self._reader.end)

    def notes(self) -> Iterator[str]:
        """What the reader of a figure should know of how it was read."""
        if self._num_bad:
            more = ", and more" if self._num_bad > len(self._bad) else ""
            yield f"{self._num_bad} lines skipped: {'; '.join(self._bad)}{more}"
        yield from self._reading.all_notes()
        if self._num_earlier and self._reading.in_order:
            yield f"{self._num_earlier} requests stand after later ones; they are put in order"

    def _file(self, source: Path | BinaryIO) -> Iterator[Record | Lengths]:
        named = str(source if isinstance(source, Path) else getattr(source, "name", ""))
        is_file = named and not named.startswith("<") and not named.isdigit()
        self.file = named if is_file else "standard input"
        if isinstance(source, Path):
            with source.open("rb") as stream:
                yield from self._stream(stream)
        else:
            yield from self._stream(source)

    def _stream(self, stream: BinaryIO) -> Iterator[Record | Lengths]:
        self.place, pieces = self.file, Pieces(stream, _is_header)
        try:
            for piece in pieces:
                self.place = f"{self.file}, line {piece.line}"
                yield from self._records(piece)
        except Bad as bad:
            self.place = f"{self.file}, line {max(1, pieces.line)}"
            self._refuse(bad)

    def _records(self, piece: Piece) -> Iterable[Record | Lengths]:
        try:
            item = self._item(piece.content)
            if item is None:
                return ()
            reader = self._reader_of(item)
        except Bad as bad:
            self._refuse(bad)
            return ()
        return self._made(lambda: reader.read(item), item)

    def _item(self, content: bytes | Mapping[str, Any] | Bad) -> Mapping[str, Any] | None:
        """What a piece holds; None for a line of a log that says nothing of requests."""
        if isinstance(content, Bad):
            raise content
        if not isinstance(content, bytes):
            return content
        known = self._format
        if content.startswith(b"{") or (known is not None and known.line is None):
            item = parsed(content)
            is_ours = known is None or known.line is None or known.matches(item)
            return item if is_ours else None
        line = content.decode(errors="replace")
        formats = FORMATS if known is None else (known,)
        said = (one.line(line) for one in formats if one.line is not None)
        found = next((one for one in said if one is not None), None)
        if found is None and known is None:
            self._num_unread += 1
            if self._unread is None:
                shown = line if len(line) <= 60 else f"{line[:57]}..."
                self._unread = Bad(f"it is neither JSON nor of a known log: {shown!r}"), self.place
        return found

    def _reader_of(self, item: Mapping[str, Any]) -> Reader:
        if self._reader is None or self._format is None:
            self._format = _format(item, self._options.format_name)
            self._reader = self._format.reader(self._reading)
            if self._format.line is None:  # no log, whose other lines could be passed over
                self._refuse_unread()
        return self._reader

    def _made(
        self,
        read: Callable[[], Iterable[Record | Lengths]],
        item: Mapping[str, Any] | None = None,
    ) -> list[Record | Lengths]:
        """What a reader makes, of `item` where it is given; nothing where that is bad."""
        try:
            try:
                found = list(read())
            except Bad as bad:
                known = self._format
                other = next((one for one in FORMATS if item and one.matches(item)), known)
                if other is known or other is None or known is None:
                    raise
                raise Bad(f"{bad}; it looks like {other.name}, in a file of {known.name}") from bad
            return found if self._lengths else [self._with_prefix(one) for one in found]
        except Bad as bad:
            self._refuse(bad)
            return []

    def _with_prefix(self, record: Record | Lengths) -> Record:
        if isinstance(record, Lengths):
            if self._id_tokens is None:
                reason = NoPrefixes(
                    f"{self.place}: this trace has lengths and no ids or text. Which prompts begin "
                    "alike is not in it: it gives arrivals, and no hit rate"
                )
                if self._options.on_bad == "error":
                    raise reason
                self.no_prefixes = self.no_prefixes or reason
            raise Bad("it has lengths and no ids, where other requests have ids")
        cached = record.num_cached_tokens
        if cached is not None and cached > record.num_tokens:
            raise Bad(f"{cached} cached tokens of a prompt of {record.num_tokens}")
        if self._id_tokens not in (None, record.id_tokens):
            raise Bad(
                f"an id stands for {record.id_tokens} tokens here and for {self._id_tokens} before"
            )
        self._id_tokens = record.id_tokens
        if self._coarsening is None:
            return record
        try:
            return self._coarsening.coarse(record)
        except TraceError as error:
            raise TraceError(f"{self.place}: {error}") from error

    def _refuse_unread(self) -> None:
        if self._unread is not None:
            self._refuse(*self._unread)
            self._num_bad += self._num_unread - 1

    def _refuse(self, bad: Bad, place: str | None = None) -> None:
        """Skips a bad line, or raises what is wrong with it."""
        told = f"{place or self.place}: {bad}"
        if self._options.on_bad == "error":
            raise TraceError(told) from bad
        self._num_bad += 1
        if len(self._bad) < _NUM_BAD_SHOWN:
            self._bad.append(told)


def _files(source: Path | BinaryIO) -> Sequence[Path | BinaryIO]:
    if not isinstance(source, Path) or not source.is_dir():
        return [source]
    files = sorted(path for path in source.glob("[!.]*") if path.is_file())
    if not files:
        raise TraceError(f"{source}: there is no file in it")
    return files


def _is_header(names: Iterable[str]) -> bool:
    return any(one.is_header(list(names)) for one in FORMATS)


def _format(item: Mapping[str, Any], name: str | None) -> Format:
    if name is not None:
        found = next((one for one in FORMATS if one.name == name), None)
        if found is None:
            raise TraceError(f"no format {name!r}; there are {', '.join(_names())}")
        return found
    found = next((one for one in FORMATS if one.matches(item)), None)
    if found is None:
        keys = ", ".join(list(item)[:8]) or "nothing"
        raise Bad(f"no known format has such a record (its keys: {keys}); known: {_names()}")
    return found


def _names() -> str:
    return ", ".join(dict.fromkeys(one.name for one in FORMATS))
