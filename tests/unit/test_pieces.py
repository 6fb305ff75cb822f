"""Pieces: files of any packing and any syntax, taken apart with the right line numbers."""

import gzip
import io
import json

import pytest

from foreword.sim.pieces import Bad, Pieces, parsed

zstandard = pytest.importorskip("zstandard")
LINES = [b'{"a": 1}', b'{"a": "\xc3\xa9 [{\\"}"}', b'{"a": 3}']


def pieces(raw, header=("x", "y")):
    return list(Pieces(io.BytesIO(raw), lambda names: tuple(names) == header))


def packed(raw, how):
    if how == "gz":
        return gzip.compress(raw)
    if how == "zst":
        return zstandard.compress(raw)
    return raw


@pytest.mark.parametrize("how", ["plain", "gz", "zst"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [b"", b"\n", b"\n\n"])
def test_lines(how, end, mark, last):
    raw = mark + end.join([LINES[0], b"", *LINES[1:]]) + last
    assert pieces(packed(raw, how)) == [(1, LINES[0]), (3, LINES[1]), (4, LINES[2])]


@pytest.mark.parametrize("how", ["gz", "zst"])
def test_parts_packed_one_after_the_other_are_one_file(how):
    raw = b"".join(packed(line + b"\n", how) for line in LINES)
    assert [piece.content for piece in pieces(raw)] == LINES


@pytest.mark.parametrize("how", ["gz", "zst"])
@pytest.mark.parametrize("num_cut", [1, 5, 12])
def test_a_packed_file_that_is_cut_off_is_no_shorter_file(how, num_cut):
    raw = packed(b"\n".join(b'{"a": %d}' % i for i in range(1000)), how)
    found, read = Pieces(io.BytesIO(raw[:-num_cut]), lambda names: False), []
    with pytest.raises(Bad, match="cut off"):
        read.extend(found)
    assert how == "zst" or found.line > 0


def test_a_damaged_packed_file():
    raw = bytearray(gzip.compress(b"\n".join(b'{"a": %d}' % i for i in range(1000))))
    raw[-6] ^= 1  # in its checksum
    with pytest.raises(Bad, match="damaged"):
        pieces(bytes(raw))
    with pytest.raises(Bad, match="cut off"):
        pieces(raw[:14])


@pytest.mark.parametrize(
    "raw",
    [
        b'[{"a": 1},\n{"a": "\xc3\xa9 [{\\"}"}\n,\n\n{"a": 3}]\n',
        b'[\n {"a": 1}, {"a": "\xc3\xa9 [{\\"}"}, {"a": 3}\n]',
        b'\n\n{\n "a": 1}\n{"a": "\xc3\xa9 [{\\"}"} {"a": 3}',
        b'[{"a": 1},{"a": "\xc3\xa9 [{\\"}"},{"a": 3}]',
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_objects_of_a_document(raw, size, monkeypatch):
    """However they are laid out, and wherever a chunk ends."""
    monkeypatch.setattr("foreword.sim.pieces._CHUNK_BYTES", size)
    found = pieces(raw)
    assert [parsed(piece.content) for piece in found] == [json.loads(line) for line in LINES]
    for piece in found:
        assert raw.split(b"\n")[piece.line - 1].lstrip(b" [,").startswith(piece.content[:1])


@pytest.mark.parametrize(
    ("raw", "line", "what"),
    [
        (b'[{"a": 1},\n{"a": 2', 2, "does not end"),
        (b'[{"a": 1},\n{"a": "2', 2, "does not end"),
        (b'[{"a": 1},\n{"a": "2\\', 2, "does not end"),
        (b'[{"a": 1}\n\n', 3, "array does not end"),
        (b'[{"a": 1},\n\n', 3, "no JSON object begins here"),
        (b'[{"a": 1}\n{"a": 2}]', 2, "no JSON object begins here"),
        (b'[{"a": 1},\n,{"a": 2}]', 2, "no JSON object begins here"),
        (b'[{"a": 1},\n7]', 2, "no JSON object begins here"),
        (b'[{"a": 1}]\n\n{"a": 2}', 3, "after the end of the JSON array"),
        (b'{\n"a": 1},\n{"a": 2}', 3, "no JSON object begins here"),
    ],
)
def test_a_document_that_is_none(raw, line, what):
    found = Pieces(io.BytesIO(raw), lambda names: False)
    with pytest.raises(Bad, match=what):
        list(found)
    assert found.line == line


def test_rows():
    raw = b'x,y\r\n1,2\r\n"a\nb","{""c"": 1}"\r\n\r\n3,\xc3\xa9\r\n'
    assert pieces(raw) == [
        (2, {"x": "1", "y": "2"}),
        (3, {"x": "a\nb", "y": '{"c": 1}'}),
        (6, {"x": "3", "y": "é"}),
    ]


def test_rows_that_are_none():
    found = pieces(b"x,y\n1\n1,2\n1,2,3\n1,\xff\n")
    assert [piece.line for piece in found] == [2, 3, 4, 5]
    assert [isinstance(piece.content, Bad) for piece in found] == [True, False, True, True]
    for raw, line in ((b'x,y\n1,2\n3,"4', 3), (b'x,y\n1,"2"3\n', 2)):
        cut = Pieces(io.BytesIO(raw), lambda names: names == ["x", "y"])
        with pytest.raises(Bad, match="CSV"):
            list(cut)
        assert cut.line == line
    with pytest.raises(Bad, match="twice"):
        pieces(b"x,x\n1,2\n", ("x", "x"))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' is there twice"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": 1', "no JSON"),
        (b"7", "a JSON object is expected"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"a": "\xff"}', "byte 8 of it is no UTF-8"),
        (b'{"a":\n\n b}', "column 2, 2 lines below"),
    ],
)
def test_what_is_no_object(text, what):
    with pytest.raises(Bad, match=what):
        parsed(text)


def test_a_line_without_end_is_not_read_into_memory(monkeypatch):
    monkeypatch.setattr("foreword.sim.pieces.LINE_BYTES_MAX", 100)
    assert len(pieces(b'{"a": "' + b"x" * 90 + b'"}\n{}')) == 2
    for raw in (b'{}\n{"a": "' + b"x" * 92 + b'"}', b'{\n"a": "' + b"x" * 2_000_000 + b'"}'):
        with pytest.raises(Bad, match="MiB"):
            pieces(raw)


def test_other_encodings_are_named():
    with pytest.raises(Bad, match="UTF-16"):
        pieces('{"a": 1}'.encode("utf-16"))


def test_who_gave_the_stream_keeps_it():
    source = io.BytesIO(b"\n".join(LINES))
    list(Pieces(source, lambda names: False))
    assert not source.closed
