"""`foreword bench meet`: a prefix that a tier brings as quickly as the device computes it.

The default model serves in this process; its host tier is throttled, to where loading a prefix
takes as long as computing it. Each prefix is asked for again after the device lost it, in three
ways in turns: all computed, all loaded, and both at once until they meet. The answers have to be
the same, token for token.
"""

import argparse
import asyncio
import statistics
from dataclasses import replace
from typing import Any

from foreword.cli.measure import (
    Reply,
    add_model_arguments,
    ask,
    engine_settings,
    forced,
    mean_interval,
    random_tokens,
)
from foreword.cli.settings import count
from foreword.core.cost import TierCost
from foreword.core.identity import Identity
from foreword.engine.engine import TorchEngine
from foreword.engine.model import load_model
from foreword.engine.settings import BLOCK_SIZE, EngineSettings
from foreword.engine.tiers import open_stores
from foreword.store.store import KVStore
from foreword.store.throttled import ThrottledStore

WAYS = ("compute", "load", "meet")
TAIL = 16  # tokens after the prefix, new each time
ANSWER = 4  # tokens
SETTLE_S = 0.3  # for the tier to write what was computed
HOST_BYTES = 4 << 30
FASTEST, LATENCY_S = 1e12, 0.001  # of the throttled tier
WARM_UP = 3  # prefixes
# Of two prefixes, the one that the device has not; each is computed first.
ORDER = ((0, "compute"), (1, "compute"), (0, "load"), (1, "meet"), (0, "meet"), (1, "load"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--prefix", type=count, default=3072, help="tokens")
    parser.add_argument("--rounds", type=count, default=7, help="prefixes, each in all three ways")
    parser.add_argument("--exact", choices=("auto", "off"), default="auto")
    parser.add_argument("--chunk", type=count, default=2048, help="tokens that a step prefills")


class ThrottledEngine(TorchEngine):
    """Its tiers are as slow as asked."""

    @staticmethod
    def stores_of(settings: EngineSettings, kv_bytes: int, identity: Identity) -> list[KVStore]:
        stores = open_stores(settings, kv_bytes, identity)
        return [ThrottledStore(store, TierCost(0.0, FASTEST)) for store in stores]


class Prefixes:
    """Asks for prefixes, one after another, of which the device has room for one."""

    def __init__(self, engine: ThrottledEngine, args: argparse.Namespace) -> None:
        self._engine = engine
        self._args = args
        self._sampling = forced(engine, ANSWER)
        self._stores = [lane.store for lane in engine.transfer.lanes]

    async def ask(self, number: int, way: str) -> Reply:
        """Prefix `number` with its tail."""
        tokens = random_tokens(number, self._args.prefix + TAIL, self._engine)
        restores = self._engine.cache.restores
        costs = restores.costs
        if way == "load":
            restores.costs = None
        try:
            return await ask(self._engine, tokens, self._sampling)
        finally:
            restores.costs = costs
            await asyncio.sleep(SETTLE_S)

    def throttle(self, seconds: float) -> None:
        """From now on loading a prefix takes so long."""
        num_blocks = self._args.prefix // BLOCK_SIZE
        num_bytes = num_blocks * self._engine.model.block_bytes(BLOCK_SIZE)
        for store in self._stores:
            assert isinstance(store, ThrottledStore)
            store.cost = TierCost(LATENCY_S, num_bytes / (seconds - LATENCY_S))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Keys: `compute_s`, `load_s`, `meet_s` (medians to the first token), `gain` (of a prefix, the
    better of compute and load over meet: the median) and its mean's 95 % interval, `same_tokens`,
    `loaded_share` of the prefix where both met, `tier_gb_per_s`."""
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    settings = engine_settings(
        args, exact=args.exact == "auto", host_bytes=HOST_BYTES, max_prefill_tokens=args.chunk
    )
    model = load_model(settings.model, dtype=settings.dtype)
    room = -(-(args.prefix + TAIL + ANSWER) // BLOCK_SIZE) + 1
    settings = replace(settings, kv_bytes=room * model.block_bytes(BLOCK_SIZE))
    engine = ThrottledEngine.load(settings)
    engine.start()
    prefixes = Prefixes(engine, args)
    for number in range(WARM_UP):  # until it is known what a step takes
        await prefixes.ask(-1 - number, "compute")
    rounds: list[dict[str, Reply]] = []
    for first in range(0, args.rounds, 2):
        pair: list[dict[str, Reply]] = [{}, {}]
        for which, way in ORDER:
            pair[which][way] = await prefixes.ask(first + which, way)
            if way == "compute":
                prefixes.throttle(pair[which][way].ttft_s)
        rounds += pair
    await engine.stop(1.0)
    seconds = {way: [one[way].ttft_s for one in rounds] for way in WAYS}
    gains = [
        min(computed, loaded) / met for computed, loaded, met in zip(*seconds.values(), strict=True)
    ]
    return {
        **{f"{way}_s": statistics.median(found) for way, found in seconds.items()},
        "gain": statistics.median(gains),
        "gain_interval": mean_interval(gains),
        "same_tokens": all(len({tuple(a.token_ids) for a in one.values()}) == 1 for one in rounds),
        "loaded_share": statistics.median(
            one["meet"].num_cached_tokens / args.prefix for one in rounds
        ),
        "prefixes": len(rounds),
        "exact": engine.exact,
    }
