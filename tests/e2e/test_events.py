"""KV events over real sockets: what is missed is asked for, what cannot be known is cleared."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from foreword.core.events import AllBlocksCleared
from foreword.router import subscriber
from foreword.router.subscriber import News
from speaker import Ear, Speaker, endpoint, listening

CLEARED = (AllBlocksCleared(),)
Talk = Callable[[Ear, Speaker], Awaitable[None]]


@pytest.fixture
def at() -> str:
    return endpoint()


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
