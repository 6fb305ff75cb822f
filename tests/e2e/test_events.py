"""KV events over real sockets: what is missed is asked for, what cannot be known is cleared."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator

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
from foreword.router import subscriber
from foreword.router.subscriber import News, Source
from foreword.server import publisher as publisher_module
from foreword.server.publisher import FORMS, EventPublisher
from laws import Listener, nodes
from speaker import Ear, Speaker, endpoint, listening, number
from tiny import make_tiny

CLEARED = (AllBlocksCleared(),)
Talk = Callable[[Ear, Speaker], Awaitable[None]]


@pytest.fixture
def at() -> str:
    return endpoint()


@pytest.fixture
def published(at: str) -> Iterator[EventPublisher]:
    publisher = EventPublisher(at)
    yield publisher
    publisher.close()


def talk(at: str, work: Talk, frames: int = 3, topic: bytes = b"") -> Speaker:
    """Let a Speaker and an Ear that hears it do `work`."""

    async def whole() -> Speaker:
        speaker = Speaker(at, frames, topic)
        try:
            async with listening(at) as ear:
                await speaker.heard()
                await work(ear, speaker)
        finally:
            speaker.close()
        return speaker

    return asyncio.run(whole())


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


@pytest.mark.parametrize("frames", [2, 3])
@pytest.mark.parametrize("topic", [b"", b"kv@here"])
def test_what_is_missed_is_asked_for(at: str, frames: int, topic: bytes) -> None:
    async def work(ear: Ear, speaker: Speaker) -> None:
        speaker.say(0)
        assert await ear.numbers(1) == [0]
        speaker.say(1, sent=False)
        speaker.say(2, sent=False)
        speaker.say(3)
        news = [await ear.next() for _ in range(3)]
        assert [(one.seq, one.note) for one in news] == [(1, None), (2, None), (3, None)]
        assert {one.topic for one in news} == {topic}
        speaker.say(4)
        assert await ear.numbers(1) == [4]

    speaker = talk(at, work, frames, topic)
    # From the last batch heard, which proves that it is the same process.
    assert speaker.asked == [0, 0]


def test_a_loss_at_the_end_is_noticed(at: str) -> None:
    """No later batch shows the gap."""

    async def work() -> None:
        speaker = Speaker(at)
        try:
            async with listening(at, quiet_s=0.2) as ear:
                await speaker.heard()
                speaker.say(0)
                speaker.say(1, sent=False)
                assert await ear.numbers(2) == [0, 1]
                speaker.say(2)
                speaker.say(3, sent=False)
                assert await ear.numbers(2) == [2, 3]
        finally:
            speaker.close()

    asyncio.run(work())


@pytest.mark.parametrize("frames", [2, 3])
def test_who_comes_late_hears_what_is_kept(at: str, frames: int) -> None:
    """Under the topic of what comes later, also where the answer does not name it."""

    async def work() -> None:
        speaker = Speaker(at, frames, b"topic")
        for seq in range(3, 6):
            speaker.say(seq)
        try:
            async with listening(at) as ear:
                joined = await ear.next()
                assert (joined.seq, joined.events) == (3, ())
                assert joined.note is not None
                assert "joined at batch 3" in joined.note
                assert await ear.numbers(3) == [3, 4, 5]
                speaker.say(6)
                assert await ear.numbers(1) == [6]
        finally:
            speaker.close()

    asyncio.run(work())


def test_a_hole_that_stays_clears(at: str) -> None:
    async def work(ear: Ear, speaker: Speaker) -> None:
        speaker.say(0)
        speaker.say(1, sent=False, kept=False)
        speaker.say(2)
        assert await ear.numbers(1) == [0]
        lost = await ear.next()
        assert (lost.events, lost.seq) == (CLEARED, 2)
        assert lost.note is not None
        assert "batches 1 to 1 are lost" in lost.note
        assert await ear.numbers(1) == [2]

    talk(at, work)


def test_nobody_answers(at: str) -> None:
    async def work(ear: Ear, speaker: Speaker) -> None:
        speaker.say(0)
        speaker.say(2)
        assert await ear.numbers(1) == [0]
        lost = await ear.next()
        assert lost.events == CLEARED
        assert lost.note is not None
        assert "nothing answers" in lost.note
        assert (await ear.next()).note == "joined at batch 2: what was cached before is not known"
        assert await ear.numbers(1) == [2]

    talk(at, work, frames=0)


def test_an_answer_with_holes_is_asked_for_again(at: str) -> None:
    async def work(ear: Ear, speaker: Speaker) -> None:
        speaker.say(0)
        assert await ear.numbers(1) == [0]
        for seq in range(1, 9):
            speaker.say(seq, sent=False)
        speaker.holes = [{3, 4}, {6}]
        speaker.say(9)
        assert await ear.numbers(9) == list(range(1, 10))

    assert talk(at, work).asked == [0, 0, 2, 5]


def test_numbers_that_start_again_are_another_process(at: str) -> None:
    async def work(ear: Ear, speaker: Speaker) -> None:
        for seq in range(4):
            speaker.say(seq)
        assert await ear.numbers(4) == [0, 1, 2, 3]
        speaker.kept.clear()
        for seq in range(2):
            speaker.say(seq, time_s=1.0, sent=False)
        speaker.say(2, time_s=1.0)
        news = await ear.next()
        assert news.events == CLEARED
        assert news.note is not None
        assert "restarted" in news.note
        assert await ear.numbers(3) == [0, 1, 2]

    talk(at, work)


def test_a_gap_that_another_process_fills_is_not_filled(at: str) -> None:
    """The new one has come further than the old one was: only the batch heard last tells."""

    async def work(ear: Ear, speaker: Speaker) -> None:
        for seq in range(3):
            speaker.say(seq)
        assert await ear.numbers(3) == [0, 1, 2]
        for seq in range(5):
            speaker.say(seq, time_s=1.0, sent=False)
        speaker.say(5, time_s=1.0)
        news = await ear.next()
        assert news.events == CLEARED
        assert await ear.numbers(6) == list(range(6))

    talk(at, work)


@pytest.mark.parametrize("same", [True, False])
def test_after_a_new_connection_it_must_be_the_same_process(at: str, same: bool) -> None:
    async def work() -> None:
        first = Speaker(at)
        async with listening(at) as ear:
            await first.heard()
            for seq in range(3):
                first.say(seq)
            assert await ear.numbers(3) == [0, 1, 2]
            first.close()
            second = Speaker(at)
            try:
                # Known only by its answer: it says nothing by itself.
                for seq in range(5 if same else 2):
                    second.say(seq, time_s=0.0 if same else 1.0, sent=False)
                if not same:
                    news = await ear.next()
                    assert news.events == CLEARED
                    assert news.note is not None
                    assert "restarted" in news.note
                assert await ear.numbers(2) == ([3, 4] if same else [0, 1])
            finally:
                second.close()

    asyncio.run(work())


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02", b"\x07", b"\x91" * 5000])
def test_a_batch_that_cannot_be_read_clears(at: str, payload: bytes) -> None:
    async def work(ear: Ear, speaker: Speaker) -> None:
        speaker.say(0)
        speaker.put(1, payload)
        speaker.say(2)
        assert await ear.numbers(1) == [0]
        news = await ear.next()
        assert (news.seq, news.events) == (1, CLEARED)
        assert news.note is not None
        assert "batch 1 cannot be read" in news.note
        assert await ear.numbers(1) == [2]

    talk(at, work)


def test_topics_are_apart_and_bounded(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "TOPICS_MAX", 2)

    async def work(ear: Ear, speaker: Speaker) -> None:
        for topic in (b"a", b"b", b"c", b"a", b"b"):
            speaker.topic = topic
            speaker.say(0 if len(heard) < 3 else 1)
            if topic != b"c":
                heard.append(await ear.next())
            else:
                heard.append(News("", b"c", 0, ()))

    heard: list[News] = []
    talk(at, work, frames=0)
    assert [(news.topic, news.seq) for news in heard] == [
        *((b"a", 0), (b"b", 0), (b"c", 0), (b"a", 1), (b"b", 1))
    ]


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
