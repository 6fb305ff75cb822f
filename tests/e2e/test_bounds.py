"""What all clients together may hold: bytes of bodies, and connections."""

import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from foreword.server import bodies, connection
from raw import HEALTH, SLACK_S, answer, closed_within, posted, refused, send

BODY = json.dumps({"model": "echo", "prompt": "x" * 400, "max_tokens": 1}).encode()


def connected(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((str(address.hostname), address.port or 0), 10)


def status(http: httpx.Client, body: bytes) -> int:
    return http.post("/v1/completions", content=body).status_code


def status_soon(http: httpx.Client, body: bytes) -> int:
    """200 when a place has become free, which the server may take a moment to see."""
    deadline_s = time.monotonic() + SLACK_S
    while (got := status(http, body)) != 200 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return got


@pytest.mark.parametrize("leaves", [False, True])
def test_bodies_of_all_are_bounded(
    url: str, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(bodies, "BODIES_BYTES_MAX", len(BODY) + 100)
    with connected(url) as slow:
        raw = posted(BODY)
        slow.sendall(raw[:-200])
        deadline_s = time.monotonic() + SLACK_S
        while (got := http.post("/v1/completions", content=BODY)).status_code == 200:
            assert time.monotonic() < deadline_s  # it has not been read yet
        assert got.status_code == 429
        assert int(got.headers["Retry-After"]) >= 1
        assert got.json()["error"]["type"] == "rate_limit_error"
        small = {"tokens": [104, 105]}
        assert http.post("/detokenize", json=small).json() == {"prompt": "hi"}
        if not leaves:
            slow.sendall(raw[-200:])
            assert answer(slow)[0] == 200
    assert status_soon(http, BODY) == 200
    larger = b" " * 200 + BODY
    assert [status(http, larger), status(http, BODY), status(http, b"{")] == [429, 200, 400]
    assert status(http, BODY) == 200


def test_connections_are_bounded(
    url: str, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECTIONS_MAX", 3)
    held = [connected(url) for _ in range(3)]
    for client in held:
        client.sendall(HEALTH)
        assert answer(client)[0] == 200
    for first in (b"", HEALTH, posted(BODY)):
        with connected(url) as surplus:
            send(surplus, first)
            surplus.settimeout(SLACK_S)
            got = answer(surplus)
            error = refused(got, 503, "3 connections are open")
            assert error["code"] == "too_many_connections"
            send(surplus, HEALTH)
            closed_within(surplus, SLACK_S)
    held[0].sendall(HEALTH)
    assert answer(held[0])[0] == 200
    held[1].close()
    assert status_soon(http, BODY) == 200
    for client in held:
        client.close()


def test_far_too_many_connections_are_just_closed(
    url: str, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(connection, "SURPLUS_MAX", 4)
    many = [connected(url) for _ in range(40)]
    said = [closed_within(client, SLACK_S) for client in many[1:]]
    assert 4 <= sum(b"too_many_connections" in answer for answer in said) < 39
    assert {answer for answer in said if b"503 Service" not in answer} <= {b""}
    for client in many:
        client.close()
    assert status_soon(http, BODY) == 200


def test_open_files_bound_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [1024]
    monkeypatch.setattr(connection.resource, "getrlimit", lambda _which: (files[0], 1 << 20))
    assert connection.most_connections() == 1024 - connection.FILES_KEPT
    files[0] = connection.resource.RLIM_INFINITY
    assert connection.most_connections() == connection.CONNECTIONS_MAX
    files[0] = 8
    assert connection.most_connections() == 1
