"""Clients that wait, drip, do not read or leave: none holds a connection or a request for long, and
none that behaves is cut off."""

import json
import re
import socket
import struct
import time
from http.client import HTTPResponse

import httpx
import pytest

from raw import (
    HEALTH,
    LIMIT_S,
    POST,
    SLACK_S,
    Server,
    answer,
    closed_within,
    connected,
    posted,
    refused,
    wait_until_idle,
)

pytestmark = pytest.mark.usefixtures("unharmed")

ENDLESS = b'{"model": "echo", "prompt": "x", "ignore_eos": true, "stream": %b}'


def test_a_body_shorter_than_said_is_a_408(peer: socket.socket) -> None:
    peer.sendall(POST + b"Content-Length: 100\r\n\r\n{}")
    refused(answer(peer), 408, "did not come")
    closed_within(peer, SLACK_S)


def test_a_body_that_waits_for_100_continue_is_a_408(peer: socket.socket) -> None:
    peer.sendall(POST + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
    refused(answer(peer), 408)  # http.peer skips the 100 Continue


def test_chunks_that_never_end_are_a_408(peer: socket.socket) -> None:
    peer.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
    refused(answer(peer), 408)


STARTS = {
    "silence": b"",
    "a_request_line": b"GET /health?",
    "headers": b"GET /health HTTP/1.1\r\nHost: x\r\nA: ",
    "after_an_answer": HEALTH + b"GET /",
    "the_body_of_a_404": b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n",
    "the_body": POST + b"Content-Length: 9999\r\n\r\n",
}


def test_slow_clients_are_cut_off(server: Server) -> None:
    """Silent, or a byte at a time: neither holds a connection for longer than the limits."""
    begin_s = time.monotonic()
    held = {(name, drips): connected(server) for name in STARTS for drips in (False, True)}
    for (name, _), client in held.items():
        client.sendall(STARTS[name])
        client.setblocking(False)
    while held and time.monotonic() < begin_s + 2 * LIMIT_S + SLACK_S:
        time.sleep(0.05)
        for key, client in list(held.items()):
            if is_cut(client, drips=key[1]):
                assert time.monotonic() - begin_s > LIMIT_S / 2, f"{key}: too early"
                held.pop(key).close()
    assert not held, "still open"


def is_cut(client: socket.socket, drips: bool) -> bool:
    try:
        if drips:
            client.sendall(b"x")
        return not client.recv(1 << 16)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_an_idle_connection_serves_on_within_the_limit(peer: socket.socket) -> None:
    for _ in range(4):
        peer.sendall(HEALTH)
        assert answer(peer)[0] == 200
        time.sleep(LIMIT_S / 2)


def test_a_long_answer_is_not_cut_off(server: Server, peer: socket.socket) -> None:
    """The limits are for what the peer does, not for how long the engine takes."""
    server[1].step_s = LIMIT_S / 2
    peer.sendall(posted(b'{"model": "echo", "prompt": "abcd"}'))
    status, body = answer(peer)
    assert (status, body["choices"][0]["text"]) == (200, "abcd")


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_reads_nothing_is_cut_off(server: Server, stream: bytes) -> None:
    """Its answer is larger than what the kernel holds for it."""
    body = ENDLESS[:-1] % stream + b', "n": 8, "logprobs": 5}'
    with connected(server) as client:
        client.sendall(posted(body))
        num_waiting, since_s = 0, time.monotonic()
        while time.monotonic() - since_s < 3 * LIMIT_S:  # since the kernel is full
            if (now := len(client.recv(1 << 24, socket.MSG_PEEK))) > num_waiting:
                num_waiting, since_s = now, time.monotonic()
            time.sleep(0.05)
        assert answer(client) == (0, None)  # what was under way has no end


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("ahead", [b"", HEALTH, HEALTH * 50], ids=["alone", "ahead", "far_ahead"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_cancels(
    server: Server, stream: bytes, ahead: bytes, how: str
) -> None:
    """However it leaves, and whatever it has sent ahead."""
    engine = server[1]
    engine.step_s = 0.01
    with connected(server) as client:
        client.sendall(posted(ENDLESS % stream))
        deadline_s = time.monotonic() + SLACK_S
        while not engine.num_open:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        client.sendall(ahead)
        time.sleep(0.1)
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    begin_s = time.monotonic()
    wait_until_idle(engine)
    assert time.monotonic() - begin_s < 2.0


@pytest.mark.parametrize("step_s", [0.0, 0.1, LIMIT_S])
def test_a_client_that_shuts_its_sending_side_is_answered(
    server: Server, peer: socket.socket, step_s: float
) -> None:
    """All that it sent before, whole and as a stream, on the wire between the pieces what every
    client discards; then the connection is closed."""
    server[1].step_s = step_s
    text = {"model": "echo", "prompt": "abc"}
    asked = [json.dumps({**text, "stream": stream}).encode() for stream in (False, True, False)]
    peer.sendall(b"".join(map(posted, asked)) + b"GET /he")
    peer.shutdown(socket.SHUT_WR)
    said = closed_within(peer, 12 * step_s + SLACK_S)
    assert said.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert said.count(b'"text":"abc"') == 2
    assert said.count(b"data: [DONE]") == 1
    interim = said.count(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert interim >= 2 if step_s == LIMIT_S else interim <= 8
    assert said.endswith((b"}", b"0\r\n\r\n"))


@pytest.mark.parametrize("raw", [b"GET /h", POST + b"Content-Length: 9\r\n\r\n{", HEALTH[:-2]])
def test_half_a_request_and_no_more_is_the_end(peer: socket.socket, raw: bytes) -> None:
    peer.sendall(raw)
    peer.shutdown(socket.SHUT_WR)
    begin_s = time.monotonic()
    assert closed_within(peer, SLACK_S) == b""
    assert time.monotonic() - begin_s < LIMIT_S / 2


def test_http_1_0_knows_no_interim_answer(server: Server, peer: socket.socket) -> None:
    server[1].step_s = LIMIT_S
    peer.sendall(posted(b'{"model": "echo", "prompt": "ab"}').replace(b"HTTP/1.1", b"HTTP/1.0"))
    peer.shutdown(socket.SHUT_WR)
    assert closed_within(peer, SLACK_S) == b""


@pytest.mark.parametrize("raw", [b"", b"GET", HEALTH, POST + b"Content-Length: 9\r\n\r\n{"])
def test_a_client_that_closes_at_once(server: Server, raw: bytes) -> None:
    for _ in range(20):
        with connected(server) as client:
            client.sendall(raw)


def test_pipelined_requests_are_answered_in_order(peer: socket.socket) -> None:
    bodies = [b'{"model": "echo", "prompt": "%d"}' % number for number in range(50)]
    peer.sendall(b"".join(map(posted, bodies)))
    with peer.makefile("rb") as file:
        raw = b""
        while raw.count(b'"text_completion"') < 50:
            raw += file.read1()
    assert re.findall(rb'"text":"(\d+)"', raw) == [b"%d" % number for number in range(50)]


def test_more_sent_ahead_than_is_read_waits(server: Server, peer: socket.socket) -> None:
    """A later request that is longer than what is read ahead is read when its turn comes."""
    server[1].step_s = 0.1
    long = posted(json.dumps({"model": "echo", "prompt": "y", "user": "z" * 300_000}).encode())
    peer.sendall(posted(b'{"model": "echo", "prompt": "x"}') + long)
    for text in "xy":
        response = HTTPResponse(peer)
        response.begin()
        assert json.loads(response.read())["choices"][0]["text"] == text


def test_many_silent_clients_keep_nobody_out(server: Server) -> None:
    idle = [connected(server) for _ in range(200)]
    assert httpx.get(f"{server[0]}/health", trust_env=False).status_code == 200
    for client in idle:
        closed_within(client, LIMIT_S + SLACK_S)
        client.close()
