"""Raw sockets to a server over an EchoEngine that waits for its clients only LIMIT_S."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest

import serving
from echo import EchoEngine
from foreword.cli.serve import bind
from foreword.server import bodies, connection

LIMIT_S = 0.5  # of every wait for the client, in these tests
SLACK_S = 4.0  # a busy machine's
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"

Server = tuple[str, EchoEngine]  # its URL too


@contextlib.contextmanager
def impatient() -> Iterator[Server]:
    engine = EchoEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "BODY_S_MAX", LIMIT_S)
        patch.setattr(connection, "HEAD_S_MAX", LIMIT_S)
        patch.setattr(connection, "STALL_S_MAX", LIMIT_S)
        patch.setattr(serving, "bind", bind_small)
        with serving.serving(engine) as url:
            yield url, engine


def bind_small(host: str, port: int) -> socket.socket:
    """A listener whose connections hold little of an answer that nobody reads."""
    listener = bind(host, port)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    return listener


def connected(server: Server) -> socket.socket:
    address = urlsplit(server[0])
    return socket.create_connection((str(address.hostname), address.port or 0), 10)


def wait_until_idle(engine: EchoEngine) -> None:
    deadline_s = time.monotonic() + SLACK_S
    while engine.num_open and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert engine.num_open == 0


def answer(client: socket.socket) -> tuple[int, Any]:
    """Status of the next answer, and its body if that is JSON; 0 when the connection was closed
    without one."""
    response = HTTPResponse(client)
    try:
        response.begin()
        raw = response.read()
    except (HTTPException, ConnectionError):
        return 0, None
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, json.loads(raw) if is_json else raw.decode()


def send(client: socket.socket, raw: bytes) -> None:
    """All of `raw`, or what the server takes before it closes."""
    with contextlib.suppress(ConnectionError):
        client.sendall(raw)


def refused(got: tuple[int, Any], status: int, words: str = "") -> dict[str, Any]:
    error = got[1]["error"] if isinstance(got[1], dict) else {}
    assert (got[0], set(error)) == (status, {"message", "type", "param", "code"}), got
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert len(error["message"]) < 500
    return dict(error)


def closed_within(client: socket.socket, limit_s: float) -> bytes:
    """The server closes the connection. Returns what it says until then."""
    client.settimeout(limit_s)
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 16):
            said += piece
    return said


def posted(body: bytes, path: bytes = b"/v1/completions") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path, len(body))
    return head + body
