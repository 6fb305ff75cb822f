"""Follow the KV events of one worker over ZeroMQ: of vLLM, of SGLang, of our own server.

Batches are numbered. What is missing is asked for at the worker's replay endpoint, which may answer
with two frames (number, batch) or three (topic, number, batch); number -1 ends the answer. Nothing
is assumed: where a hole stays, or the worker may be another process than before, its blocks are
said to be cleared, and what it still tells of its past is heard anew. So the listener may know too
little of a worker, but nothing that was true only once.
"""

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from foreword.core.events import AllBlocksCleared, KVEvent
from foreword.core.wire import BadBatch, decode_batch, replay_endpoint

QUEUED_MAX = 10_000  # batches that may wait in the socket; more are missed, which is noticed
REMEMBERED_MAX = 10_000  # digests of batches, to tell one that is repeated from another one
TOPICS_MAX = 64  # of one worker; more are not followed
BATCH_BYTES_MAX = 64 << 20
ANSWER_S = 2.0  # how long the replay endpoint may be silent
QUIET_S = 1.0  # after which it is asked whether that was all: a loss at the end shows no gap
NUMBER_BYTES = 8  # of a batch's number, big-endian
END = -1  # the number that ends an answer


@dataclass(frozen=True, slots=True)
class Source:
    """Where a worker publishes: endpoints such as tcp://10.0.0.7:5557."""

    endpoint: str
    replay: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """ENDPOINT or ENDPOINT,REPLAY; the replay endpoint is the next port unless it is said.
        Raises ValueError."""
        endpoint, comma, replay = text.partition(",")
        next_port = replay_endpoint(endpoint)
        if comma:
            replay_endpoint(replay)  # only to see whether it is one
        return cls(endpoint, replay if comma else next_port)


@dataclass(frozen=True, slots=True)
class News:
    """One batch of a worker, or what befell its stream: then `note` says it."""

    worker: str  # the endpoint
    topic: bytes
    seq: int  # the batch's number; for a note, of the next batch that counts
    events: tuple[KVEvent, ...]
    time_s: float | None = None  # by the worker's clock
    rank: int | None = None
    num_unknown: int = 0  # events of kinds that this version does not know
    replayed: bool = False
    note: str | None = None


class Heard:
    """What was heard of one topic so far."""

    def __init__(self) -> None:
        self.next_seq = 0
        self._digests: deque[int] = deque(maxlen=REMEMBERED_MAX)

    def add(self, seq: int, payload: bytes) -> None:
        assert seq == self.next_seq
        self._digests.append(hash(payload))
        self.next_seq += 1

    def start_at(self, seq: int) -> None:
        self._digests.clear()
        self.next_seq = seq

    def has(self, seq: int, payload: bytes) -> bool:
        """Whether batch `seq` was heard, and as these bytes: another process numbers anew, and its
        batches have other times."""
        back = self.next_seq - seq
        return 0 < back <= len(self._digests) and self._digests[-back] == hash(payload)


class Subscription:
    """One worker's events, in order. Iterate over `news()`; closing that ends the subscription."""

    def __init__(
        self, source: Source, answer_s: float = ANSWER_S, quiet_s: float = QUIET_S
    ) -> None:
        self.source = source
        self._answer_ms, self._quiet_ms = round(answer_s * 1000), round(quiet_s * 1000)
        self._answers = False  # the replay endpoint did, when it was asked last
        # None: batches of an answer without topics, until one arrives that has one.
        self._topics: dict[bytes | None, Heard] = {}
        self._context = zmq.asyncio.Context.instance()

    async def news(self) -> AsyncGenerator[News, None]:
        """Connects, and again whenever the connection is lost; never ends by itself. Whoever takes
        too long between two of them misses some, and is told so."""
        endpoint = self.source.endpoint
        with self._socket(zmq.SUB, endpoint) as listener:
            listener.setsockopt(zmq.SUBSCRIBE, b"")
            poller = zmq.asyncio.Poller()
            poller.register(listener, zmq.POLLIN)
            with listener.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as connections:
                poller.register(connections, zmq.POLLIN)
                try:
                    listener.connect(endpoint)
                    quiet_ms = None
                    while True:
                        ready = dict(await poller.poll(quiet_ms))
                        if connections in ready:
                            await connections.recv_multipart()
                            steps = self._connected(listener)
                        elif listener in ready:
                            steps = self._arrived(await listener.recv_multipart())
                        else:
                            steps = self._fill_all()
                        async with aclosing(steps):
                            async for news in steps:
                                yield news
                        quiet_ms = self._quiet_ms if ready and self._answers else None
                finally:
                    listener.disable_monitor()

    def _socket(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.RCVHWM, QUEUED_MAX)
        opened.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        opened.setsockopt(zmq.IPV6, "[" in endpoint)
        return opened

    async def _connected(self, listener: zmq.asyncio.Socket) -> AsyncGenerator[News, None]:
        """Hear what went before; where something was heard already, from the same process only."""
        if self._topics:
            # What arrived around the break may be of either process. It is asked for again.
            with suppress(zmq.Again):
                while True:
                    await listener.recv_multipart(zmq.NOBLOCK)
        async with aclosing(self._fill_all()) as steps:
            async for news in steps:
                yield news

    async def _fill_all(self) -> AsyncGenerator[News, None]:
        for topic in list(self._topics) or [None]:
            async with aclosing(self._fill(topic)) as steps:
                async for news in steps:
                    yield news

    async def _arrived(self, frames: list[bytes]) -> AsyncGenerator[News, None]:
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            return  # no KV events
        topic, seq, payload = frames[0], int.from_bytes(frames[1], "big"), frames[2]
        heard = self._heard(topic)
        if heard is None or heard.has(seq, payload):
            return
        if seq < heard.next_seq:
            yield self._cleared(topic, 0, "restarted: it numbers its batches anew")
            heard.start_at(0)
        if seq > heard.next_seq:
            async with aclosing(self._fill(topic)) as steps:
                async for news in steps:
                    yield news
        if seq < heard.next_seq:
            return  # it was in the answer
        if seq > heard.next_seq:
            yield self._jump(topic, heard, seq)
        yield self._read(topic, heard, seq, payload)

    async def _fill(self, topic: bytes | None) -> AsyncGenerator[News, None]:
        """Ask for what follows the batch heard last. That batch comes first, and proves that the
        process is the same; of another one, all that it still has is heard. An answer may have
        holes, as ROUTER sockets lose what they cannot send: then ask again while that helps."""
        heard, asks = self._heard(topic), True
        while asks and heard is not None:
            start, asks = heard.next_seq, False
            proven, reason = start == 0, f"nothing answers at {self.source.replay}"
            async with aclosing(self._ask(topic, max(0, start - 1))) as answers:
                async for said, seq, payload in answers:
                    if topic is None and said is not None:
                        topic, heard = said, self._heard(said) or heard
                    if not proven:
                        proven = heard.has(seq, payload)
                        reason = "restarted, or it no longer has what was missed"
                    asks = not proven or seq > heard.next_seq > start
                    if asks or seq == END:
                        break
                    if seq > heard.next_seq:
                        yield self._jump(topic, heard, seq)
                    if seq == heard.next_seq:
                        yield self._read(topic, heard, seq, payload, replayed=True)
            if not proven:
                yield self._cleared(topic, 0, reason)
                heard.start_at(0)

    async def _ask(
        self, topic: bytes | None, first: int
    ) -> AsyncGenerator[tuple[bytes | None, int, bytes], None]:
        """What the replay endpoint has of a topic from number `first` on: topic where it is said,
        number, batch; number END where it says that this is all. Ends early after a silence."""
        # A socket for each question: what comes too late is nobody's.
        with self._socket(zmq.DEALER, self.source.replay) as asker:
            asker.connect(self.source.replay)
            self._answers = False
            await asker.send_multipart((b"", first.to_bytes(NUMBER_BYTES, "big")))
            while await asker.poll(self._answer_ms):
                _, *frames = await asker.recv_multipart()
                if len(frames) not in (2, 3) or len(frames[-2]) != NUMBER_BYTES:
                    continue
                seq = int.from_bytes(frames[-2], "big", signed=True)
                said = frames[0] if len(frames) == 3 and seq != END else None
                self._answers = seq == END
                if seq == END or said is None or topic in (None, said):
                    yield said, seq, frames[-1]
                if seq == END:
                    return

    def _heard(self, topic: bytes | None) -> Heard | None:
        """None: of more topics than are followed."""
        if topic not in self._topics:
            if None in self._topics:
                self._topics[topic] = self._topics.pop(None)
            elif len(self._topics) < TOPICS_MAX:
                self._topics[topic] = Heard()
        return self._topics.get(topic)

    def _jump(self, topic: bytes | None, heard: Heard, seq: int) -> News:
        """Go on at batch `seq` although those before it are not known."""
        first = heard.next_seq
        heard.start_at(seq)
        if first == 0:
            note = f"joined at batch {seq}: what was cached before is not known"
            return News(self.source.endpoint, topic or b"", seq, (), note=note)
        return self._cleared(topic, seq, f"batches {first} to {seq - 1} are lost")

    def _cleared(self, topic: bytes | None, seq: int, reason: str) -> News:
        note = f"{reason}; nothing is known to be cached there"
        return News(self.source.endpoint, topic or b"", seq, (AllBlocksCleared(),), note=note)

    def _read(
        self,
        topic: bytes | None,
        heard: Heard,
        seq: int,
        payload: bytes,
        replayed: bool = False,
    ) -> News:
        heard.add(seq, payload)
        try:
            batch = decode_batch(msgspec.msgpack.decode(payload))
        except (BadBatch, msgspec.DecodeError, RecursionError) as error:
            return self._cleared(topic, seq, f"batch {seq} cannot be read: {error}")
        return News(
            self.source.endpoint,
            topic or b"",
            seq,
            batch.events,
            batch.time_s,
            batch.rank,
            batch.num_unknown,
            replayed,
        )
