"""KV events in tests: an engine's publisher that says and keeps exactly what a test wants, and an
ear that collects what a Subscription hears."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import zmq

from foreword.core.events import BlockRemoved
from foreword.core.wire import EventBatch, encode_batch, replay_endpoint
from foreword.router.subscriber import News, Source, Subscription

END = b"\xff" * 8
WAIT_S = 20.0


def endpoint() -> str:
    """One of this machine whose port and the next are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return f"tcp://127.0.0.1:{port}"


def number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


class Speaker:
    """Publishes at `at` and answers on the next port, in `frames` frames, or not at all with 0."""

    def __init__(self, at: str, frames: int = 3, topic: bytes = b"") -> None:
        self.frames, self.topic = frames, topic
        self.kept: dict[int, bytes] = {}
        self.holes: list[set[int]] = []  # what the next answers leave out
        self.asked: list[int] = []
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._sender = self._context.socket(zmq.XPUB)
        self._sender.bind(at)
        self._answerer = self._context.socket(zmq.ROUTER)
        if frames:
            self._answerer.bind(replay_endpoint(at))
        self._open = True
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._context.destroy()

    async def heard(self) -> None:
        """Somebody has subscribed."""
        assert await asyncio.to_thread(self._sender.poll, int(WAIT_S * 1000))
        assert self._sender.recv() == b"\x01"

    def say(self, seq: int, *, time_s: float = 0.0, sent: bool = True, kept: bool = True) -> None:
        """A batch that names its number, as the hash of a block that was removed."""
        batch = EventBatch(time_s, (BlockRemoved((number(seq),)),))
        self.put(seq, msgspec.msgpack.encode(encode_batch(batch)), sent=sent, kept=kept)

    def put(self, seq: int, payload: bytes, *, sent: bool = True, kept: bool = True) -> None:
        if kept:
            self.kept[seq] = payload
        if sent:
            self._sender.send_multipart((self.topic, number(seq), payload))

    def _answer(self) -> None:
        while self._open:
            if not self._answerer.poll(20):
                continue
            peer, empty, first = self._answerer.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            holes = self.holes.pop(0) if self.holes else set()
            topics = (self.topic,) * (self.frames == 3)
            for seq in sorted(self.kept.keys() - holes):
                if number(seq) >= first:
                    parts = (*topics, number(seq), self.kept[seq])
                    self._answerer.send_multipart((peer, empty, *parts))
            self._answerer.send_multipart((peer, empty, *topics[:1], END, b""))


class Ear:
    def __init__(self, source: Source, quiet_s: float) -> None:
        self.queue: asyncio.Queue[News] = asyncio.Queue()
        self.subscription = Subscription(source, answer_s=1.0, quiet_s=quiet_s)

    async def listen(self) -> None:
        async for news in self.subscription.news():
            self.queue.put_nowait(news)

    async def next(self) -> News:
        return await asyncio.wait_for(self.queue.get(), WAIT_S)

    async def numbers(self, count: int) -> list[int]:
        """Of the next batches, none of which is a note."""
        heard = [await self.next() for _ in range(count)]
        assert [news.note for news in heard] == [None] * count
        for news in heard:
            assert news.events == (BlockRemoved((number(news.seq),)),)
        return [news.seq for news in heard]


@asynccontextmanager
async def listening(at: str, quiet_s: float = 30.0) -> AsyncIterator[Ear]:
    ear = Ear(Source.parse(at), quiet_s)
    task = asyncio.create_task(ear.listen())
    try:
        yield ear
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
