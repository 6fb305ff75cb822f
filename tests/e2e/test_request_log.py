"""A replay of a server's request log predicts what the server counted."""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from statistics import median

import pytest

from foreword.core.request import Request, SamplingParams
from foreword.engine.engine import TorchEngine
from foreword.engine.request_log import RequestLog
from foreword.engine.settings import EngineSettings
from foreword.server.metrics import exposition
from foreword.sim.fleet import FleetRules, play
from foreword.sim.formats.request_log import read_engine
from foreword.sim.importer import read_trace
from tiny import make_tiny

BLOCK = 16
POOL = 24  # blocks
LONGEST = 200  # tokens of a prompt


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("log") / "model", "llama")
    plain = EngineSettings(str(folder), num_threads=1, max_model_len=POOL * BLOCK, exact=False)
    room = TorchEngine.load(plain).model.block_bytes(BLOCK) * POOL
    return replace(plain, kv_bytes=room, max_prefill_tokens=96, max_batch_tokens=64)


@asynccontextmanager
async def serving(settings, path):
    engine, log = TorchEngine.load(settings), RequestLog(path)
    engine.start(log=log)
    try:
        yield engine
    finally:
        await engine.stop(5.0)
        log.close()


class Clients:
    """Prompts that branch off earlier prompts and answers, cut anywhere, or off one of `openings`,
    which are token ids."""

    def __init__(self, seed, openings=()):
        self.random = Random(seed)
        self.openings = openings
        self.known = [[]]
        self.number = 0

    def request(self):
        draw = self.random
        if self.openings:
            base, n, salt, reports = draw.choice(self.openings), 1, "", False
        else:
            base = draw.choice(self.known[-12:])
            base = base[: draw.choice([len(base), draw.randint(0, len(base))])][:LONGEST]
            n, salt = draw.choice([1, 1, 1, 1, 2, 3]), draw.choice(["", "", "", "a", "b"])
            reports = draw.random() < 0.05
        prompt = base + [draw.randrange(10, 500) for _ in range(draw.randint(1, 40))]
        self.number += 1
        sampling = SamplingParams(
            draw.choice([1, 3, 20, 40]), seed=self.number, prompt_logprobs=1 if reports else None
        )
        return Request(str(self.number), tuple(prompt), sampling, n, salt)

    async def ask(self, engine, leaves=None):
        """One request; its client may leave after so many outputs."""
        request, answer, num_outputs = self.request(), [], 0
        stream = engine.generate(request)
        async for output in stream:
            num_outputs += 1
            if output.index == 0:
                answer += output.token_ids
            if num_outputs == leaves:
                await stream.aclose()
                break
        self.known.append([*request.prompt, *answer])


async def written(engine):
    """Wait until all that the tiers were given is there."""
    while any(
        lane.outbound.num_free < lane.outbound.num_cells or lane.done
        for lane in engine.transfer.lanes
    ):
        await asyncio.sleep(0.001)


def counted(engine):
    """Hit tokens by tier, and prompt tokens, as /metrics has them."""
    hits, tokens = {}, 0
    for line in exposition(engine.stats).decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("foreword_prefix_cache_hit_tokens_total"):
            hits[name.split('"')[1]] = int(float(value))
        if name.startswith("foreword_prefix_cache_miss_tokens_total"):
            tokens = int(float(value))
    return hits, tokens + sum(hits.values())


def replayed(path):
    """The same as a replay has it, the places of requests whose hits it has otherwise than the log,
    and the median TTFT in both."""
    logged = read_engine(path)
    with read_trace(path) as trace:
        timing = play(trace, logged.shape, FleetRules())
        seen = {record.place: record for record in trace}
    hits = {room.name: 0 for room in logged.shape.tiers}
    for journey in timing.journeys:
        for tier, num in journey.restored.items():
            hits[logged.shape.tiers[tier].name] += num
    all_hits = sum(journey.num_hit_tokens for journey in timing.journeys)
    hits = {"device": all_hits - sum(hits.values()), **hits}
    tokens = sum(journey.num_tokens for journey in timing.journeys)
    wrong = {
        journey.place
        for journey in timing.journeys
        if journey.num_hit_tokens != seen[journey.place].num_cached_tokens
    }
    ttfts = (
        median(journey.first_token_s - journey.sent_s for journey in timing.journeys),
        median(record.ttft_s for record in seen.values() if record.ttft_s is not None),
    )
    return (hits, tokens), wrong, ttfts


TIERS = {
    "device": {},
    "disk": {"disk_bytes": (1 << 20) + 12288},
    "host and disk": {"host_bytes": 1 << 18, "disk_bytes": (1 << 20) + 12288},
}


@pytest.mark.parametrize(
    ("tiers", "store"),
    [
        *((tiers, "write-through") for tiers in TIERS),
        *(("host and disk", store) for store in ("write-back", "on-second-use")),
    ],
)
def test_a_serial_log_is_predicted_exactly(settings, tmp_path, tiers, store):
    """By rules for which no time counts but the order of uses; what `gain` does depends on the
    seconds that the server measured."""
    path = tmp_path / "log.jsonl"
    rules = {"store": store, "evict": "lru", "disk_folder": tmp_path / "kv"}
    chosen = replace(settings, **TIERS[tiers], **rules)

    async def work():
        clients = Clients(7)
        async with serving(chosen, path) as engine:
            for number in range(120):
                await clients.ask(engine, leaves=2 if number % 9 == 5 else None)
                while engine.stats.num_running or engine.stats.num_waiting:
                    await asyncio.sleep(0.001)
                await written(engine)
                if number == 60:
                    assert await engine.clear_cache()
            assert engine.stats.num_evicted_blocks > 100
            return counted(engine)

    served = asyncio.run(work())
    predicted, wrong, _ttfts = replayed(path)
    assert all(served[0].values())
    assert not wrong
    assert predicted == served


def test_a_concurrent_log_is_predicted_within_half_a_point(settings, tmp_path):
    """Eight clients, each of whom asks again when it has its answer, share four openings. A step
    takes some 20 ms, so that whatever else this machine does is little beside it."""
    path = tmp_path / "log.jsonl"
    openings = [[(7 * i + 31 * k) % 490 + 10 for i in range(60 + 30 * k)] for k in range(4)]

    async def client(clients, engine):
        for _ in range(15):
            await clients.ask(engine)
            await asyncio.sleep(0.004)

    async def work():
        clients = Clients(3, openings)
        async with serving(replace(settings, kv_bytes=3 * settings.kv_bytes), path) as engine:
            engine.runner.step = slowed(engine.runner.step)
            await asyncio.gather(*(client(clients, engine) for _ in range(8)))
            assert engine.stats.num_evicted_blocks > 100
            return counted(engine)

    hits, tokens = asyncio.run(work())
    (predicted, replayed_tokens), _wrong, (ttft_s, logged_s) = replayed(path)
    assert replayed_tokens == tokens
    assert hits["device"] > 0.4 * tokens
    assert abs(predicted["device"] - hits["device"]) < 0.005 * tokens
    assert ttft_s == pytest.approx(logged_s, rel=0.15)


def slowed(step):
    def slow(parts):
        time.sleep(0.02 + 0.0003 * sum(len(part.token_ids) for part in parts))
        return step(parts)

    return slow
