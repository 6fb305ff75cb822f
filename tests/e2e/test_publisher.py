"""What publishes KV events, a whole server that does, and the command that prints them."""

import asyncio
import json
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from foreword.cli import events as command
from foreword.cli import main as cli
from foreword.cli.failure import EXIT_CODES
from foreword.cli.measure import ask
from foreword.cli.serve import publishing
from foreword.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from foreword.core.request import SamplingParams
from foreword.engine.engine import TorchEngine
from foreword.engine.settings import EngineSettings
from foreword.router.subscriber import News, Source
from foreword.server import publisher as publisher_module
from foreword.server.publisher import FORMS, EventPublisher
from laws import Listener, nodes
from speaker import Ear, endpoint, listening, number
from tiny import make_tiny

CLEARED = (AllBlocksCleared(),)


@pytest.fixture
def at() -> str:
    return endpoint()


@pytest.fixture
def published(at: str) -> Iterator[EventPublisher]:
    publisher = EventPublisher(at)
    yield publisher
    publisher.close()


@pytest.mark.parametrize("form", FORMS)
def test_what_is_published_is_heard(at: str, form: str) -> None:
    stored = BlockStored((b"\x01" * 32,), None, (1, 2), 2)
    batches = [(stored,), (BlockRemoved((b"\x01" * 32,)),), CLEARED]
    publisher = EventPublisher(at, form, clock=lambda: 7.0)

    async def work() -> list[News]:
        async with listening(at, quiet_s=0.2) as ear:
            publisher.publish(batches[0])
            first = await ear.next()
            for batch in batches[1:]:
                publisher.publish(batch)
            return [first, await ear.next(), await ear.next()]

    try:
        heard = asyncio.run(work())
    finally:
        publisher.close()
    assert [(news.seq, news.events, news.note) for news in heard] == [
        (seq, batch, None) for seq, batch in enumerate(batches)
    ]
    assert {news.time_s for news in heard} == {7.0}


def test_the_publisher_never_waits_and_its_drops_are_seen(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "WAITING_MAX", 3)
    busy, go = threading.Event(), threading.Event()
    encode = publisher_module.encode_batch

    def slow(*args, **kwargs):
        busy.set()
        assert go.wait(20)
        return encode(*args, **kwargs)

    monkeypatch.setattr(publisher_module, "encode_batch", slow)
    publisher = EventPublisher(at)

    def publish(seq: int) -> None:
        publisher.publish((BlockRemoved((number(seq),)),))

    async def work() -> None:
        async with listening(at, quiet_s=0.2) as ear:
            publish(0)
            assert busy.wait(20)
            for seq in range(1, 10):
                publish(seq)
            assert publisher.num_dropped == 6
            go.set()
            assert await ear.numbers(4) == [0, 1, 2, 3]
            publish(10)
            lost = await ear.next()
            assert lost.events == CLEARED
            assert lost.note is not None
            assert "batches 4 to 9 are lost" in lost.note
            assert await ear.numbers(1) == [10]

    try:
        asyncio.run(work())
    finally:
        publisher.close()


@pytest.mark.parametrize("question", [[b"x"], [b"", b"1234567"], [b"", bytes(8), b""], [b""] * 9])
def test_a_strange_question_harms_nobody(
    published: EventPublisher, at: str, question: list[bytes]
) -> None:
    asker = zmq.Context.instance().socket(zmq.DEALER)
    asker.connect(published.replay_endpoint)
    asker.send_multipart(question)

    async def work() -> None:
        async with listening(at, quiet_s=0.2) as ear:
            published.publish((BlockRemoved((number(0),)),))
            assert await ear.numbers(1) == [0]

    asyncio.run(work())
    asker.close(linger=0)


def test_the_publisher_keeps_what_its_bounds_allow(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = len(msgspec.msgpack.encode([0.0, [["BlockRemoved", [number(0)], "GPU"]]]))
    monkeypatch.setattr(publisher_module, "KEPT_BYTES_MAX", 5 * payload)
    publisher = EventPublisher(at, "arrays", clock=lambda: 0.0)

    async def work() -> None:
        for seq in range(8):
            publisher.publish((BlockRemoved((number(seq),)),))
        async with listening(at, quiet_s=0.2) as ear:
            news = await ear.next()
            while news.note is None:  # it was quicker than the publisher
                news = await ear.next()
            assert await ear.numbers(5) == [3, 4, 5, 6, 7]

    publisher.publish((BlockRemoved((number(0),)),))
    publisher.close()
    publisher = EventPublisher(at, "arrays", clock=lambda: 0.0)
    try:
        asyncio.run(work())
    finally:
        publisher.close()


def test_thousands_of_batches_are_asked_for_at_once(published: EventPublisher, at: str) -> None:
    count = 3000  # more than sockets queue unless they are told to

    async def work() -> None:
        for seq in range(count):
            published.publish((BlockRemoved((number(seq),)),))
        assert not published.num_dropped
        async with listening(at, quiet_s=0.2) as ear:
            assert await ear.numbers(count) == list(range(count))

    asyncio.run(work())


def test_a_server_says_what_its_cache_holds(
    at: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After stores, evictions and a clear: the listener's blocks are the cache's own."""
    folder = str(make_tiny(tmp_path_factory.mktemp("tiny") / "model"))
    settings = EngineSettings(folder, dtype="float32", exact=False, kv_bytes=1 << 19)

    async def work() -> None:
        engine = TorchEngine.load(settings)
        listener = Listener()

        async def settled(ear: Ear) -> None:
            while set(listener.parents) != {h for node in nodes(engine.cache) for h in node.hashes}:
                news = await ear.next()
                assert news.note is None
                listener.hear(news.events)

        with publishing(at) as publish:
            engine.start(publish)
            try:
                async with listening(at, quiet_s=0.2) as ear:
                    for start in (1, 1, 2, 3, 4, 1):
                        prompt = [start, *range(100, 400)]
                        sampling = SamplingParams(20, temperature=0, ignore_eos=True)
                        await ask(engine, prompt, sampling)
                        await settled(ear)
                    assert engine.stats.num_evicted_blocks
                    assert len(listener.parents) > 20
                    assert await engine.clear_cache()
                    await settled(ear)
                    assert not listener.parents
            finally:
                await engine.stop(5.0)

    asyncio.run(work())


def test_the_command_says_it_in_lines() -> None:
    stored = BlockStored((b"\xaa" * 32, b"\xbb" * 32), b"\xcc" * 32, (1, 2, 3, 4), 2)
    events = (stored, BlockRemoved((b"\xaa" * 32,), "CPU", 1), AllBlocksCleared())
    news = News("tcp://h:1", b"kv", 7, events, 1.5, 2, num_unknown=3, replayed=True)
    assert [command.line(fact) for fact in command.facts(news)] == [
        "tcp://h:1 kv rank 2 #7 stored 2 on GPU: aaaaaaaaaaaa bbbbbbbbbbbb, after cccccccccccc, "
        "4 tokens (replayed)",
        "tcp://h:1 kv rank 2 #7 removed 1 on CPU group 1: aaaaaaaaaaaa (replayed)",
        "tcp://h:1 kv rank 2 #7 cleared everything (replayed)",
        "tcp://h:1 kv rank 2 #7 3 events of kinds that are not known (replayed)",
    ]
    fact = json.loads(json.dumps(next(command.facts(news))))
    assert fact["block_hashes"] == ["aa" * 32, "bb" * 32]
    assert (fact["event"], fact["token_ids"], fact["batch"]) == ("BlockStored", [1, 2, 3, 4], 7)
    note = News("tcp://h:1", b"", 3, CLEARED, note="restarted")
    assert [command.line(fact) for fact in command.facts(note)] == ["tcp://h:1 #3 restarted"]


def test_the_command_refuses_what_is_no_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["events", "http://127.0.0.1:8000"]) == EXIT_CODES["usage"]
    assert "is no endpoint: write it as tcp://127.0.0.1:5557" in capsys.readouterr().err
    assert Source.parse("tcp://h:1") == Source("tcp://h:1", "tcp://h:2")
    assert Source.parse("tcp://h:1,tcp://g:9") == Source("tcp://h:1", "tcp://g:9")


@pytest.mark.parametrize(
    ("setting", "words", "code"),
    [
        ("tcp://127.0.0.1", "no endpoint", "settings"),
        ("tcp://127.0.0.1:5557,json", "'json' is none of mixed, arrays, maps", "settings"),
        ("tcp://192.0.2.1:5557", "cannot publish KV events on tcp://192.0.2.1:5557", "address"),
    ],
)
def test_what_cannot_be_published_on_is_one_line(
    setting: str, words: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--port", "0", "--kv-events", setting]) == EXIT_CODES[code]
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
