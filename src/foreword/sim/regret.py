"""Regret: is any request slower with the cache than without? In virtual time, over a grid.

A cell is a tier's speed, how often its reads stall, how long the prompts are and whether requests
come one by one or together. Its stream is played without a cache, with ours and by the rules of
others, and each request's time to the first token is held against the one without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from random import Random
from typing import Any, Protocol

from foreword.core.block import Chain
from foreword.core.cost import TierCost
from foreword.sim.journey import Journey
from foreword.sim.percentile import percentile
from foreword.sim.prompt import prompt_chain
from foreword.sim.rivals import RIVALS, RivalWorker
from foreword.sim.shape import Reading, TierRoom, WorkerShape
from foreword.sim.trace import Record
from foreword.sim.worker import Worker

REGRET_SHARE, REGRET_S = 0.01, 1e-3  # beyond both together a request is slower
LOAD = 0.5  # of what a worker without a cache can do
# As engine.lane and engine.staging have them.
NUM_READERS, MOST_READERS, CELL_BYTES, NUM_CELLS = 4, 16, 2 << 20, 64
EXPECTED = TierCost(0.001, 1e9)  # as engine.tiers expects of a disk
_MISSES = 0.25  # the share of requests of which the tier has nothing
_ANSWER = 1  # tokens: how streams are shared with those that write is not what is asked here


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid. `together`: requests come at random, at LOAD of the capacity; else one
    by one."""

    bytes_per_s: float
    latency_s: float
    stall_share: float
    num_tokens: int
    together: bool

    def shown(self) -> dict[str, Any]:
        return {
            "gb_per_s": self.bytes_per_s / 1e9,
            "latency_ms": self.latency_s * 1e3,
            "stall_share": self.stall_share,
            "prompt_tokens": self.num_tokens,
            "arrivals": "poisson" if self.together else "one by one",
        }


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a stream: `gap_s` after the last one came or, one by one, after it ended."""

    record: Record
    chain: Chain
    gap_s: float
    num_found: int  # leading blocks that the tier has


class Serves(Protocol):
    """What a stream is played to."""

    @property
    def is_stepping(self) -> bool: ...

    @property
    def next_news_s(self) -> float | None: ...

    def send(self, record: Record, chain: Chain, now_s: float) -> Journey | None: ...

    def begin(self, now_s: float, until_s: float) -> float | None: ...

    def end(self, now_s: float) -> list[Journey]: ...


def stream(cell: Cell, shape: WorkerShape, num_requests: int, seed: int) -> list[Asked]:
    """Prompts of the cell's length, give or take a quarter, that share nothing with each other. Of
    some the tier has nothing, of the others from a quarter to all."""
    draw = Random(f"{seed} {cell.num_tokens} {cell.together}")
    mean_s = prefill_s(shape, cell.num_tokens) + (_ANSWER - 1) * shape.cost.per_step_s
    asked, size, first_id = [], shape.block_size, 0
    for place in range(num_requests):
        num_tokens = int(cell.num_tokens * draw.uniform(0.75, 1.25))
        ids = range(first_id, first_id + num_tokens)
        first_id += num_tokens
        answer = range((1 << 31) + place * _ANSWER, (1 << 31) + (place + 1) * _ANSWER)
        record = Record(num_tokens, ids, 1, 0.0, _ANSWER, answer, place=place)
        found = 0.0 if draw.random() < _MISSES else draw.uniform(0.25, 1.0)
        num_found = min(int(found * num_tokens), num_tokens - 1) // size
        gap_s = draw.expovariate(LOAD / mean_s) if cell.together else draw.expovariate(1.0)
        asked.append(Asked(record, prompt_chain(record, size), gap_s, num_found))
    return asked


def prefill_s(shape: WorkerShape, num_tokens: int) -> float:
    """Of a prompt alone, in the steps that it takes."""
    step = shape.max_prefill_tokens
    return sum(
        shape.cost.prefill_s(min(step, num_tokens - at), at) for at in range(0, num_tokens, step)
    )


def play(server: Serves, asked: Sequence[Asked], *, together: bool) -> list[float]:
    """Seconds to the first token of each request, in their order."""
    sent_s, first_s = [inf] * len(asked), [inf] * len(asked)
    now_s, next_s, step_s, at = 0.0, asked[0].gap_s, inf, 0
    news_s: float | None = None
    num_left = len(asked)
    while num_left:
        now_s = min(next_s, step_s, inf if news_s is None or step_s < inf else news_s)
        assert now_s < inf, "all wait, and nothing comes"
        if step_s <= now_s:
            step_s = inf
            for journey in server.end(now_s):
                first_s[journey.place] = journey.first_token_s
                num_left -= 1
                if not together and at < len(asked):
                    next_s = now_s + asked[at].gap_s
        if next_s <= now_s:
            one = asked[at]
            sent_s[at], at = now_s, at + 1
            server.send(one.record, one.chain.copy(), now_s)
            next_s = now_s + asked[at].gap_s if together and at < len(asked) else inf
        if not server.is_stepping:
            end_s = server.begin(now_s, min(next_s, news_s or inf))
            step_s = inf if end_s is None else end_s
        news_s = server.next_news_s
    return [first - sent for first, sent in zip(first_s, sent_s, strict=True)]


def grid(
    bytes_per_s: Sequence[float],
    latencies_s: Sequence[float],
    stall_shares: Sequence[float],
    lengths: Sequence[int],
) -> list[Cell]:
    """All cells of these."""
    axes = product(bytes_per_s, latencies_s, stall_shares, lengths, (False, True))
    return [Cell(*axis) for axis in axes]


def measure(
    cells: Sequence[Cell],
    shape: WorkerShape,
    num_requests: int,
    rivals: Sequence[str],
    seed: int,
    expected: TierCost | None = None,
) -> Iterator[tuple[Cell, dict[str, list[float]]]]:
    """Each cell, with the seconds of its requests by who served them: `off`, `ours` and the rivals.
    Without `expected` a calibration knows each tier as it is without stalls."""
    streams: dict[tuple[int, bool], tuple[list[Asked], list[float]]] = {}
    for cell in cells:
        kind = (cell.num_tokens, cell.together)
        if kind not in streams:
            asked = stream(cell, shape, num_requests, seed)
            without = Worker(with_room(shape, asked, reuse=False), 1)
            streams[kind] = (asked, play(without, asked, together=cell.together))
        asked, off = streams[kind]
        cost = TierCost(cell.latency_s, cell.bytes_per_s)
        reading = Reading(
            NUM_READERS, MOST_READERS, CELL_BYTES, NUM_CELLS, cell.stall_share, gives_up=True
        )
        room = TierRoom("tier", 1 << 40, cost, reading=reading)
        start = expected or calibrated(cost)
        own = with_room(shape, asked, tiers=(room,), seed=seed, expected=(shape.cost, start))
        seconds = {"off": off, "ours": play(ours(own, asked), asked, together=cell.together)}
        patient = replace(room, reading=replace(reading, gives_up=False, from_front=True))
        found = {one.record.place: one.num_found for one in asked}
        for name in rivals:
            rival = RivalWorker(replace(own, tiers=(patient,)), RIVALS[name], found)
            seconds[name] = play(rival, asked, together=cell.together)
        yield cell, seconds


def with_room(shape: WorkerShape, asked: Sequence[Asked], **changes: Any) -> WorkerShape:
    """Changed, with a device that has room for all prompts of a stream and their answers."""
    num_blocks = sum(-(-(len(one.chain) + _ANSWER) // shape.block_size) for one in asked)
    return replace(shape, num_blocks=num_blocks, **changes)


def calibrated(cost: TierCost) -> TierCost:
    """What reading many cells from a tier shows: the latency of each is paid by its reader."""
    own = NUM_READERS * CELL_BYTES / cost.load_s(CELL_BYTES)
    return replace(cost, bytes_per_s=min(cost.bytes_per_s, own))


def ours(shape: WorkerShape, asked: Sequence[Asked]) -> Worker:
    """A worker whose tier has what each request of a stream is to find there."""
    worker = Worker(shape, 1)
    (tier,) = worker.cache.lower.tiers
    tier.writes = False
    for one in asked:
        hashes = one.chain.hashes[: one.num_found]
        tier.restore(zip(hashes, [one.chain.root, *hashes], strict=False))
    return worker


def judged(off: Sequence[float], on: Sequence[float]) -> dict[str, float]:
    """The shares of requests that are slower and faster than without a cache, by more than
    REGRET_SHARE and REGRET_S; P99 over P99, mean over mean."""
    pairs = list(zip(off, on, strict=True))
    return {
        "regretted_share": sum(b > a * (1 + REGRET_SHARE) + REGRET_S for a, b in pairs) / len(off),
        "faster_share": sum(a > b * (1 + REGRET_SHARE) + REGRET_S for a, b in pairs) / len(off),
        "p99_ratio": percentile(sorted(on), 0.99) / percentile(sorted(off), 0.99),
        "mean_ratio": sum(on) / sum(off),
    }


@dataclass(slots=True)
class _Watched:
    """A worker, with a note of when its tier was turned off and on, and why."""

    worker: Worker
    sent_s: list[float] = field(default_factory=list)  # of requests that the tier has blocks of
    turns: list[tuple[float, bool, str]] = field(default_factory=list)

    @property
    def is_stepping(self) -> bool:
        return self.worker.is_stepping

    @property
    def next_news_s(self) -> float | None:
        return self.worker.next_news_s

    def send(self, record: Record, chain: Chain, now_s: float) -> Journey | None:
        if self.worker.cache.lower.tiers[0].num_ready(chain.hashes, 0, 1):
            self.sent_s.append(now_s)
        return self.worker.send(record, chain, now_s)

    def begin(self, now_s: float, until_s: float) -> float | None:
        end_s = self.worker.begin(now_s, until_s)
        switch = self.worker.cache.restores.switches[0]
        if switch.enabled is not (self.turns[-1][1] if self.turns else True):
            self.turns.append((now_s, switch.enabled, switch.why))
        return end_s

    def end(self, now_s: float) -> list[Journey]:
        return self.worker.end(now_s)


def switched(
    shape: WorkerShape,
    costs: tuple[TierCost, TierCost],
    num_tokens: int,
    num_requests: int,
    seed: int,
) -> dict[str, Any]:
    """A tier of the first of `costs`, of the second for the middle third of a stream, and of the
    first again; requests one by one. After how many of them that found blocks there it is off, and
    how long after its recovery it is on again for good."""
    good, bad = costs
    cell = Cell(good.bytes_per_s, good.latency_s, 0.0, num_tokens, together=False)
    asked = stream(cell, shape, num_requests, seed)
    slow_s = sum(one.gap_s for one in asked) / 3
    reading = Reading(NUM_READERS, MOST_READERS, CELL_BYTES, NUM_CELLS, gives_up=True)
    later = ((slow_s, bad), (2 * slow_s, good))
    room = TierRoom("tier", 1 << 40, good, reading=reading, later=later)
    start = (shape.cost, calibrated(good))
    own = with_room(shape, asked, tiers=(room,), seed=seed, expected=start)
    watched = _Watched(ours(own, asked))
    play(watched, asked, together=False)
    off = next((turn for turn in watched.turns if turn[0] >= slow_s and not turn[1]), None)
    last = watched.turns[-1] if watched.turns else None
    num_before = sum(slow_s <= at <= off[0] for at in watched.sent_s) if off else None
    return {
        "slow": {"latency_s": bad.latency_s, "gb_per_s": bad.bytes_per_s / 1e9},
        "off_while_good": any(not on for at, on, _why in watched.turns if at < slow_s),
        "off_after_requests": num_before,
        "on_after_s": last[0] - 2 * slow_s if last and last[1] else None,
        "why": [why for _at, _on, why in watched.turns],
    }
