"""Broken and hostile requests over raw sockets: each gets a 4xx or a closed connection, and the
server goes on as if nothing had been."""

import json
import socket
from typing import Any

import httpx
import pytest

from foreword.server.bodies import BODY_BYTES_MAX
from foreword.server.openai import IGNORED, KNOWN, UNSUPPORTED, Kind
from raw import LIMIT_S, POST, SLACK_S, Server, answer, closed_within, posted, refused, send

pytestmark = pytest.mark.usefixtures("unharmed")

NO_HTTP = {
    "words": b"please give me tokens\r\n\r\n",
    "a_tls_hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\r\n\r\n",
    "no_version": b"GET /health\r\nHost: x\r\n\r\n",
    "no_method": b" /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a_method_of_signs": b"G(E)T /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "no_host": b"GET /health HTTP/1.1\r\n\r\n",
    "two_hosts": b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "a_null_in_the_path": b"GET /v1/models/\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes_in_the_path": b"GET /v1/models/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "a_blank_in_the_path": b"GET /v1/models/a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "a_null_in_a_header": b"GET /health HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
    "a_header_without_colon": b"GET /health HTTP/1.1\r\nHost: x\r\nnothing\r\n\r\n",
    "a_blank_before_the_colon": b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    "a_length_below_0": POST + b"Content-Length: -1\r\n\r\n",
    "a_length_in_words": POST + b"Content-Length: many\r\n\r\n",
    "a_length_of_30_digits": POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
    "two_lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
    "an_unknown_encoding": POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "a_chunk_of_no_size": POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\nabc\r\n",
    "a_chunk_below_0": POST + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n",
    "a_chunk_without_end": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}garbage\r\n0\r\n\r\n",
    "blank_lines": b"\r\n" * 20,
    "a_chunk_size_of_30_digits": POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n",
}


@pytest.mark.parametrize("raw", NO_HTTP.values(), ids=list(NO_HTTP))
def test_what_is_no_http_is_a_400_and_the_end(peer: socket.socket, raw: bytes) -> None:
    send(peer, raw)
    refused(answer(peer), 400, "Invalid HTTP")
    closed_within(peer, SLACK_S)


def test_http_2_is_not_spoken(peer: socket.socket) -> None:
    peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
    refused(answer(peer), 404)
    closed_within(peer, SLACK_S)


TOO_LONG = {
    "a_path": b"GET /" + b"x" * (1 << 20),
    "a_header": b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"x" * (1 << 20),
    "headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: x\r\n" * 200_000,
    "a_chunk_size": POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * (1 << 20),
    "a_trailer": POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nA: " + b"x" * (1 << 20),
}


@pytest.mark.parametrize("raw", TOO_LONG.values(), ids=list(TOO_LONG))
def test_a_head_of_a_megabyte_is_not_read(peer: socket.socket, raw: bytes) -> None:
    """Its end is never looked for; the answer may be lost, since the peer is still sending."""
    send(peer, raw)
    status, _ = answer(peer)
    assert status in (0, 400)
    closed_within(peer, SLACK_S)


# method, path, status
ROUTES = [
    ("BREW", "/v1/chat/completions", 405),
    ("get", "/v1/models", 405),
    ("DELETE", "/v1/models/echo", 405),
    ("TRACE", "/health", 405),
    ("PUT", "/v1/completions", 405),
    ("OPTIONS", "*", 404),
    ("CONNECT", "example.org:443", 404),
    ("GET", "http://example.org/health", 404),
    ("GET", "//health", 404),
    ("GET", "/v1/models/../../../etc/passwd", 404),
    ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
    ("GET", "/v1/models/%00", 404),
    ("GET", "/v1/models/%ff%fe%ed%a0%80", 404),
    ("GET", "/v1/models/%", 404),
    ("GET", "/v1/models/%zz%0d%0aSet-Cookie:%20a=b", 404),
    ("GET", "/v1/models/" + "x" * 10_000, 404),
    ("GET", "/" + "%0a" * 3_000, 404),
    ("GET", "/[::1/nothing", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), ROUTES, ids=lambda value: str(value)[:40])
def test_paths_and_methods_that_are_not_there(
    peer: socket.socket, method: str, path: str, status: int
) -> None:
    peer.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    refused(answer(peer), status)


@pytest.mark.parametrize("host", ["[", "[::1", "x:99999999999", "a b", "@", "\xff\xfe", "%00/?#"])
@pytest.mark.parametrize("path", ["/nothing", "/health/"])
def test_a_nonsense_host_breaks_no_answer(peer: socket.socket, host: str, path: str) -> None:
    peer.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1"))
    status, body = answer(peer)
    assert status in (307, 400, 404), body


BODIES = {
    "nothing": (b"", "not JSON"),
    "half": (b'{"model": "echo", "prompt": "hel', "not JSON"),
    "single_quotes": (b"{'model': 'echo'}", "not JSON"),
    "two_values": (b"{} {}", "not JSON"),
    "a_comment": (b"{} // x", "not JSON"),
    "a_list": (b"[]", "a JSON object"),
    "null": (b"null", "a JSON object"),
    "a_byte_order_mark": (b'\xef\xbb\xbf{"model": "echo", "prompt": "x"}', "not JSON"),
    "utf_16": ('{"model": "echo"}'.encode("utf-16"), "not UTF-8"),
    "latin_1": (b'{"model": "echo", "prompt": "\xe9"}', "not UTF-8"),
    "an_overlong_slash": (b'{"model": "echo", "prompt": "\xc0\xaf"}', "not UTF-8"),
    "a_surrogate_as_bytes": (b'{"model": "echo", "prompt": "\xed\xa0\x80"}', "not UTF-8"),
    "a_lone_surrogate": (b'{"model": "echo", "prompt": "\\udc00"}', "surrogate"),
    "a_surrogate_as_key": (
        b'{"model": "echo", "prompt": "x", "logit_bias": {"\\ud800": 1}}',
        "surr",
    ),
    "a_raw_null": (b'{"model": "echo", "prompt": "a\x00b"}', "not JSON"),
    "brackets": (b'{"model": "echo", "prompt": ' + b"[" * 100_000, "nested"),
    "closed_brackets": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    "braces": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested"),
    "nan": (b'{"model": "echo", "prompt": "x", "top_p": NaN}', "NaN is not"),
    "infinity": (b'{"model": "echo", "prompt": "x", "min_p": Infinity}', "Infinity is not"),
    "1e999": (b'{"model": "echo", "prompt": "x", "repetition_penalty": 1e999}', "from 0.01"),
    "minus_1e999": (b'{"model": "echo", "prompt": "x", "presence_penalty": -1e999}', "from -2"),
    "5000_digits": (b'{"model": "echo", "prompt": "x", "seed": 1' + b"0" * 5000 + b"}", "not JSON"),
    "n_1e999": (b'{"model": "echo", "prompt": "x", "n": 1e999}', "an integer"),
    "bias_1e999": (b'{"model": "echo", "prompt": "x", "logit_bias": {"1": 1e999}}', "from -100"),
    "token_1e999": (b'{"model": "echo", "prompt": [1e999]}', "a token id"),
}


@pytest.mark.parametrize(("body", "words"), BODIES.values(), ids=list(BODIES))
def test_bad_json(peer: socket.socket, body: bytes, words: str) -> None:
    peer.sendall(posted(body))
    refused(answer(peer), 400, words)


HUGE = 10**400
FIELDS: list[tuple[str, Any]] = [
    *((name, HUGE) for name in ("n", "max_tokens", "top_k", "seed", "logprobs", "min_tokens")),
    *((name, -HUGE) for name in ("n", "max_tokens", "top_k", "seed", "logprobs", "min_tokens")),
    *((name, HUGE) for name in ("temperature", "top_p", "min_p", "frequency_penalty")),
    ("repetition_penalty", -HUGE),
    ("prompt", [HUGE]),
    ("prompt", [-1]),
    ("prompt", [[]]),
    ("prompt", [[[1]]]),
    ("prompt", ["a"] * 100_000),
    ("prompt", [1] * 100_000),
    ("prompt", "x" * 1_000_000),
    ("prompt", {"a": 1}),
    ("stop", ["a"] * 100_000),
    ("stop", "a" * 1_000_000),
    ("stop", {"a": "b"}),
    ("stop", [["a"]]),
    ("logit_bias", {str(10**18): 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {"1": HUGE}),
    ("logit_bias", {"1": "1"}),
    ("logit_bias", {str(i): 1 for i in range(10_000)}),
    ("cache_salt", "x" * 1_000_000),
    ("model", "x" * 1_000_000),
    ("x" * 1_000_000, 1),
    ("stream_options", {"include_usage": True}),
]


@pytest.mark.parametrize(("name", "value"), FIELDS, ids=lambda value: str(value)[:24])
def test_absurd_values(peer: socket.socket, name: str, value: Any) -> None:
    body = {"model": "echo", "prompt": "x", name: value}
    peer.sendall(posted(json.dumps(body).encode()))
    got = answer(peer)
    refused(got, 404 if name == "model" else 400)


WRONG: tuple[Any, ...] = (True, 0.5, "1", [], [None], {}, {"a": [1]})


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
def test_every_field_refuses_wrong_types(server: Server, kind: str) -> None:
    """No value of any type in any field is the server's failure."""
    short: Kind = "chat" if kind.startswith("chat") else "text"
    opening = {"messages": [{"role": "user", "content": "x"}]} if short == "chat" else {}
    with httpx.Client(base_url=server[0], trust_env=False) as http:
        for name in (*KNOWN[short], *UNSUPPORTED[short]):
            statuses = set()
            for value in WRONG:
                body = {"model": "echo", **(opening or {"prompt": "x"}), "max_tokens": 1}
                got = http.post(f"/v1/{kind}", json={**body, name: value})
                assert got.status_code in (200, 400, 404), (name, value, got.text)
                if got.status_code != 200:
                    refused((got.status_code, got.json()), got.status_code)
                statuses.add(got.status_code)
            assert statuses != {200} or name in IGNORED, name


def test_of_equal_keys_the_last_counts(peer: socket.socket) -> None:
    peer.sendall(posted(b'{"model": "no", "model": "echo", "prompt": "a", "prompt": "b"}'))
    status, body = answer(peer)
    assert (status, body["choices"][0]["text"]) == (200, "b")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(peer: socket.socket, chunked: bool) -> None:
    size = BODY_BYTES_MAX + 1
    if chunked:
        piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        peer.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(size // (1 << 20) + 1):
            peer.sendall(piece)
        peer.sendall(b"0\r\n\r\n")
    else:
        peer.sendall(posted(b" " * size))
    refused(answer(peer), 413, f"at most {BODY_BYTES_MAX}")


def test_a_body_longer_than_said_is_another_request(peer: socket.socket) -> None:
    peer.sendall(POST + b"Content-Length: 2\r\n\r\n{} and more of it\r\n\r\n")
    first, second = closed_within(peer, SLACK_S).split(b"HTTP/1.1 400 Bad Request\r\n")[1:]
    assert b"'model' is missing" in first
    assert b"Invalid HTTP" in second


def test_a_bad_chunk_after_an_answer_ends_the_connection(peer: socket.socket) -> None:
    peer.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    refused(answer(peer), 404)
    send(peer, b"garbage\r\n\r\n")
    closed_within(peer, LIMIT_S / 2)
