"""One client's connection: uvicorn's HTTP/1.1 with a bound on every wait for the client.

uvicorn itself bounds only the silence between two requests: a head that never ends, or an answer
that nobody reads, would be held for ever.
"""

import asyncio
import json
import resource
from http import HTTPStatus
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from foreword.server.errors import ApiError, error_body

HEAD_S_MAX = 10.0  # from the connection, or the end of an answer, to the next whole head
STALL_S_MAX = 30.0  # in which a client must read something of what waits for it
AHEAD_BYTES_MAX = 64 << 10  # of later requests, read while one is answered
CONNECTIONS_MAX = 4096  # fewer where fewer files may be open
FILES_KEPT = 128  # for all that is no connection: the model, logs, processes that try a grammar
SURPLUS_MAX = 32  # connections beyond the limit that are told so at a time; more are just closed
SURPLUS_S = 1.0  # for a client to read that there are too many
ASK_S, ASK_S_MAX = 0.1, 1.0  # between two interim answers to one that may have left; it doubles


def most_connections() -> int:
    """How many connections may be open at a time."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(1, min(CONNECTIONS_MAX, files - FILES_KEPT))


class Connection(H11Protocol):
    """While no request is answered, the next head must be whole within HEAD_S_MAX, however it
    drips. While an answer waits to be read, some of it must go within each STALL_S_MAX. A client
    that misses either is cut off; its request is cancelled as if it had left. One beyond the most
    connections is told so and closed."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _ask_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        # From the first byte that the kernel does not take: what is less would wait unwatched.
        self.transport.set_write_buffer_limits(high=0)
        num_surplus = len(self.connections) - most_connections()
        if num_surplus > SURPLUS_MAX:
            self.transport.abort()
        elif num_surplus > 0:
            self._turn_away()
        else:
            self._watch_head()

    def _turn_away(self) -> None:
        """Say that there are too many, then listen a little without hearing: closed with its
        request unread, the client would see a broken connection and no answer."""
        message = f"{most_connections()} connections are open: come again later."
        error = ApiError(message, code="too_many_connections", status=503)
        self._refuse(error, [("Retry-After", "1")])
        self.transport.write_eof()
        self.transport.set_protocol(_Deaf(self))
        self._head_timer = self.loop.call_later(SURPLUS_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._stall_timer, self._ask_timer):
            if timer is not None:
                timer.cancel()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch_head()
        ahead, _ = self.conn.trailing_data
        if self.conn.their_state is h11.DONE and len(ahead) <= AHEAD_BYTES_MAX:
            # uvicorn stops reading at the start of a later request. Then nobody would notice that
            # the client leaves.
            self.flow.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to stay open. A client that has sent all it wants and one that has left look
        alike, until something is sent: where there is nobody, the second piece fails."""
        if not self._is_answering or self.cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        if self._ask_timer is None:  # after a pause in reading, the end is met again
            self._ask(ASK_S)
        return True

    def _ask(self, wait_s: float) -> None:
        self._ask_timer = self.loop.call_later(wait_s, self._on_ask, wait_s)

    def _on_ask(self, wait_s: float) -> None:
        if self.conn.our_state is h11.SEND_RESPONSE:
            # What a client discards that has not asked for it. Parts of an answer ask as well.
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")
        self._ask(min(2 * wait_s, ASK_S_MAX))

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle and not self.cycle.response_complete)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins with the next request, if one was sent ahead
        self._watch_head()
        if self._ask_timer is not None and not self._is_answering:
            self.transport.close()

    def _watch_head(self) -> None:
        if self._is_answering:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S_MAX, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _watch_reading(self, num_unread: int) -> None:
        self._stall_timer = self.loop.call_later(STALL_S_MAX, self._on_stall, num_unread)

    def _on_stall(self, num_unread: int) -> None:
        num_left = self.transport.get_write_buffer_size()
        if num_left < num_unread:
            self._watch_reading(num_left)
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in OpenAI's shape; where an answer has begun, just close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(ApiError(msg, code="invalid_http"), [])
        self.transport.close()

    def _refuse(self, error: ApiError, more_headers: list[tuple[str, str]]) -> None:
        body = json.dumps(error_body(error)).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            *more_headers,
        ]
        reason = HTTPStatus(error.status).phrase.encode()
        response = h11.Response(status_code=error.status, headers=headers, reason=reason)
        for event in (response, h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


class _Deaf(asyncio.Protocol):
    """Drops what comes, until the connection is closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
