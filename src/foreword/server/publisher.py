"""Publish KV events over ZeroMQ, as vLLM does: whoever follows vLLM's events can follow ours.

PUB: three frames, topic (empty), sequence number (8 bytes, big-endian, from 0) and the batch as
msgpack. On the next port a ROUTER takes a number and answers with every batch from there on that is
still kept, each as topic, number and batch, and number -1 at the end.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from foreword.core.events import KVEvent
from foreword.core.wire import EventBatch, encode_batch, replay_endpoint

log = logging.getLogger("foreword.publisher")

TOPIC = b""
END = (-1).to_bytes(8, "big", signed=True)
WAITING_MAX = 10_000  # batches that the engine is ahead of the thread; beyond they are lost
KEPT_MAX = 10_000  # batches that can be asked for again
KEPT_BYTES_MAX = 64 << 20
QUESTION_BYTES_MAX = 1 << 10
# How batches and events are written: (batch as a map, events as maps).
FORMS = {"mixed": (False, True), "arrays": (False, False), "maps": (True, True)}


class EventPublisher:
    """One publisher on a thread of its own. What its subscribers miss, by their slowness or ours,
    they see as a gap in the numbers."""

    def __init__(
        self, endpoint: str, form: str = "mixed", clock: Callable[[], float] = time.time
    ) -> None:
        """Binds both ports. `form` is one of FORMS. Raises ValueError for another form or an
        endpoint not written as tcp://HOST:PORT, OSError where it cannot be bound."""
        if form not in FORMS:
            raise ValueError(f"{form!r} is none of {', '.join(FORMS)}")
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint(endpoint)
        self.num_dropped = 0
        self._batch_as_map, self._events_as_maps = FORMS[form]
        self._clock = clock
        self._next_seq = 0
        self._waiting: deque[tuple[int, EventBatch]] = deque()
        self._kept: deque[tuple[bytes, bytes]] = deque()  # (number, batch)
        self._kept_bytes = 0
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._wake_out, self._wake_in = os.pipe()
        try:
            self._sender = self._bound(zmq.PUB, self.endpoint)
            self._answerer = self._bound(zmq.ROUTER, self.replay_endpoint)
        except zmq.ZMQError as error:
            self._free()
            raise OSError(error.errno, error.strerror) from error
        for end in (self._wake_out, self._wake_in):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run, name="foreword-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        bound = self._context.socket(kind)
        # A whole answer, and as much again: a ROUTER loses what does not fit.
        bound.set_hwm(2 * KEPT_MAX)
        bound.setsockopt(zmq.MAXMSGSIZE, QUESTION_BYTES_MAX)
        bound.setsockopt(zmq.IPV6, "[" in endpoint)
        bound.bind(endpoint)
        return bound

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Send one batch. Never waits: where too many do, this one is dropped, and its number with
        it. From one thread only."""
        seq = self._next_seq
        self._next_seq += 1
        if len(self._waiting) >= WAITING_MAX:
            if not self.num_dropped:
                log.warning("KV events come faster than they can be sent; some are dropped")
            self.num_dropped += 1
            return
        self._waiting.append((seq, EventBatch(self._clock(), tuple(events))))
        self._wake()

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits, for `timeout_s` seconds at most, and end."""
        self._closing = True
        self._wake()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._free()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # woken so often that it must be awake
            os.write(self._wake_in, b"\0")

    def _free(self) -> None:
        self._context.destroy()
        os.close(self._wake_out)
        os.close(self._wake_in)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        poller.register(self._answerer, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            if self._wake_out in ready:
                os.read(self._wake_out, 1 << 16)
            self._send_waiting()
            if self._answerer in ready:
                self._answer(self._answerer.recv_multipart())
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            seq, batch = self._waiting.popleft()
            plain = encode_batch(
                batch, batch_as_map=self._batch_as_map, events_as_maps=self._events_as_maps
            )
            number, payload = seq.to_bytes(8, "big"), msgspec.msgpack.encode(plain)
            self._sender.send_multipart((TOPIC, number, payload))
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > KEPT_MAX or self._kept_bytes > KEPT_BYTES_MAX:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, question: list[bytes]) -> None:
        """Frames of a question: who asks, nothing, the first number wanted."""
        if len(question) != 3 or len(question[2]) != 8:
            log.warning("a question for old KV events is not understood: %d frames", len(question))
            return
        peer, _, first = question
        for number, payload in self._kept:
            if number >= first:
                self._answerer.send_multipart((peer, b"", TOPIC, number, payload))
        self._answerer.send_multipart((peer, b"", b"", END, b""))
