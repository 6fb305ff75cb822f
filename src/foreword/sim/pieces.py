"""A file taken apart: plain, gz or zst; lines, JSON objects or CSV rows, with their line numbers.

Nothing is kept of what went before, so that a file of any size takes the memory of its longest line
or object.
"""

import csv
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final, NamedTuple

from foreword.sim.trace import TraceError

LINE_BYTES_MAX: Final = 1 << 28  # a longer one would fill the memory before it says anything
_CHUNK_BYTES: Final = 1 << 20
_PACKED_BYTES: Final = 1 << 16  # of a packed stream at once: it may hold a thousand times as many
_BOM = b"\xef\xbb\xbf"
_OTHER_TEXT = (b"\xff\xfe", b"\xfe\xff")  # UTF-16

_OUTSIDE = re.compile(rb'["{}\[\]]')  # what matters outside of a JSON string
_GAP = re.compile(rb"[ \t\r\n,]*")
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # the rest of a JSON string


class Bad(TraceError):
    """A line, or a value that began in it, that no record comes from. It may be skipped."""


class Piece(NamedTuple):
    """A line, a JSON value or a CSV row, and the number of its first line, from 1."""

    line: int
    content: "bytes | Mapping[str, str] | Bad"


class _Raw(io.RawIOBase):
    """A stream of `chunks`. Closing it closes nothing else: what they come from is another's."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._ready = memoryview(chunk)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _buffered(chunks: Iterator[bytes]) -> "io.BufferedReader[_Raw]":
    return io.BufferedReader(_Raw(chunks), _CHUNK_BYTES)


def _chunks(stream: BinaryIO, size: int) -> Iterator[bytes]:
    return iter(lambda: stream.read(size), b"")


def _gzip() -> tuple[Callable[[], Any], type[Exception]]:
    return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error


def _zstd() -> tuple[Callable[[], Any], type[Exception]]:
    import zstandard  # an extra

    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError


# What a packed stream begins with; how a part of it is opened, and how that fails.
_PACKINGS = {b"\x1f\x8b": _gzip, b"\x28\xb5\x2f\xfd": _zstd}


def _unpack(stream: BinaryIO, opener: Callable[[], Any], fault: type[Exception]) -> Iterator[bytes]:
    """What the parts of a packed stream hold, one after the other; all there is before a cut.
    Raises Bad where it is damaged or ends in the middle of a part."""
    part = None
    for chunk in _chunks(stream, _PACKED_BYTES):
        while chunk:
            part = part or opener()
            try:
                yield part.decompress(chunk)
            except fault as error:
                raise Bad(f"the file is damaged after this line: {error}") from error
            chunk = part.unused_data.lstrip(b"\0") if part.eof else b""
            part = None if part.eof else part
    if part is not None:
        raise Bad("the file is cut off after this line: what packed it has not ended")


def unpacked(stream: BinaryIO) -> "io.BufferedReader[_Raw]":
    """The bytes of a stream, whatever packed them; a byte order mark is passed over. Raises Bad for
    text of another encoding, ModuleNotFoundError where zst is not installed."""
    plain = _buffered(_chunks(stream, _CHUNK_BYTES))
    magic = plain.peek(4)[:4]
    for start, packing in _PACKINGS.items():
        if magic.startswith(start):
            plain = _buffered(_unpack(plain, *packing()))
    magic = plain.peek(4)[:4]
    if magic.startswith(_OTHER_TEXT):
        raise Bad("it is UTF-16 text; save it as UTF-8")
    if magic.startswith(_BOM):
        plain.read(len(_BOM))
    return plain


class Pieces:
    """The pieces of one stream. `line` is the number of the line that was reached."""

    def __init__(self, stream: BinaryIO, is_header: Callable[[Sequence[str]], bool]) -> None:
        """`is_header`: are these the names of a CSV file's columns?"""
        self.line = 0
        self._is_header = is_header
        self._source = stream
        self._stream: io.BufferedReader[_Raw]

    def __iter__(self) -> Iterator[Piece]:
        """Raises Bad where the stream is cut off, or where the next piece begins cannot be told:
        nothing comes after."""
        self._stream = unpacked(self._source)
        first = self._next_line()
        while first and not first.strip():
            first = self._next_line()
        opening = first.strip()
        # `[2026-...` begins a line of a log
        if opening == b"{" or (opening.startswith(b"[") and not opening.startswith(b"[20")):
            yield from self._values(first)
        elif self._is_header(opening.decode(errors="replace").split(",")):
            yield from self._rows(first)
        else:
            while first:
                if first.strip():
                    yield Piece(self.line, first.strip())
                first = self._next_line()

    def _next_line(self) -> bytes:
        line = self._stream.readline(LINE_BYTES_MAX + 1)
        self.line += bool(line)
        if len(line) > LINE_BYTES_MAX:
            raise Bad(f"it is longer than {LINE_BYTES_MAX >> 20} MiB")
        return line

    def _rows(self, header: bytes) -> Iterator[Piece]:
        def lines() -> Iterator[str]:
            line = header
            while line:
                yield line.decode("utf-8", "surrogateescape")
                line = self._next_line()

        csv.field_size_limit(LINE_BYTES_MAX)
        rows = csv.reader(lines(), strict=True)
        start = self.line
        try:
            names = next(rows)
            if len(set(names)) < len(names):
                raise Bad("a column's name is there twice")
            start = self.line + 1
            for row in rows:
                if row and len(row) != len(names):
                    bad = Bad(f"{len(row)} columns, and the first line names {len(names)}")
                    yield Piece(start, bad)
                elif row and not _is_text(row):
                    yield Piece(start, Bad("it is no UTF-8"))
                elif row:
                    yield Piece(start, dict(zip(names, row, strict=True)))
                start = self.line + 1
        except csv.Error as error:
            self.line = start
            raise Bad(f"the CSV row that begins here cannot be read: {error}") from error

    def _values(self, first: bytes) -> Iterator[Piece]:
        """The objects of a JSON document: the elements of an array, or one after the other."""
        scan = _Scan(first, self._stream, self.line)
        try:
            yield from scan
        finally:
            self.line = scan.line


class _Scan:
    """Finds where the objects of a JSON document begin and end, without reading what is in them."""

    def __init__(self, first: bytes, stream: "io.BufferedReader[_Raw]", line: int) -> None:
        self._buffer = bytearray(first)
        self._stream = stream
        self.line = line
        self._in_array = first.lstrip().startswith(b"[")

    def __iter__(self) -> Iterator[Piece]:
        if self._in_array:
            self._drop(self._buffer.index(b"[") + 1)
        num_found = 0
        while True:
            gap, mark = self._gap(), self._buffer[:1]
            if mark == b"{" and gap == (b"," if self._in_array and num_found else b""):
                end = self._end()
                yield Piece(self.line, bytes(self._buffer[:end]))
                self._drop(end)
                num_found += 1
            elif mark == b"]" and self._in_array and not gap:
                self._drop(1)
                if self._gap() or self._buffer:
                    raise Bad("something comes after the end of the JSON array")
                return
            elif mark or gap:
                raise Bad("no JSON object begins here")
            elif self._in_array:
                raise Bad("the file is cut off: its JSON array does not end")
            else:
                return

    def _more(self) -> bool:
        chunk = self._stream.read1(_CHUNK_BYTES)
        self._buffer += chunk
        return bool(chunk)

    def _drop(self, num_bytes: int) -> None:
        self.line += self._buffer.count(b"\n", 0, num_bytes)
        del self._buffer[:num_bytes]

    def _gap(self) -> bytes:
        """Drops what lies before the next object, and says what it was, white space aside."""
        gap = b""
        while True:
            found = _GAP.match(self._buffer)
            assert found is not None  # it matches nothing, too
            gap += found[0].translate(None, b" \t\r\n")
            self._drop(found.end())
            if self._buffer or not self._more():
                return gap

    def _end(self) -> int:
        """Where the object ends that the buffer begins with."""
        depth, place, in_string = 0, 0, False
        while True:
            if in_string:
                found = _INSIDE.match(self._buffer, place)
                assert found is not None
                place = found.end()
                if self._buffer[place : place + 1] == b'"':
                    in_string, place = False, place + 1
                    continue
            elif found := _OUTSIDE.search(self._buffer, place):
                place = found.end()
                mark = self._buffer[place - 1]
                in_string = mark == ord('"')
                if not in_string:
                    depth += 1 if mark in b"{[" else -1
                    if depth == 0:
                        return place
                continue
            else:
                place = len(self._buffer)
            if len(self._buffer) > LINE_BYTES_MAX:
                raise Bad(f"the object that begins here has over {LINE_BYTES_MAX >> 20} MiB")
            if not self._more():
                raise Bad("the file is cut off: the object that begins here does not end")


def decoded(line: bytes) -> str:
    """Raises Bad."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise Bad(f"byte {error.start + 1} of it is no UTF-8") from error


def _is_text(row: Sequence[str]) -> bool:
    """Were all bytes of it UTF-8?"""
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return False
    return True


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Bad(f"the key {twice!r} is there twice")
    return found


def _refuse(constant: str) -> None:
    raise Bad(f"{constant} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse)


def parsed(text: bytes) -> dict[str, Any]:
    """The JSON object that a text is. Raises Bad."""
    try:
        found = _DECODER.decode(decoded(text))
    except json.JSONDecodeError as error:
        below = f", {error.lineno - 1} lines below" if error.lineno > 1 else ""
        raise Bad(f"no JSON: {error.msg} at column {error.colno}{below}") from error
    except (ValueError, RecursionError) as error:
        raise Bad(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Bad("a JSON object is expected here")
    return found
