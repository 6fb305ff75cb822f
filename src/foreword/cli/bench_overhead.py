"""`foreword bench overhead`: what the cache costs when nothing is shared.

The CPU share of the cache's calls and of hashing the prompts in a run whose prompts share nothing;
the CPU seconds of such runs with reuse on against off, in interleaved pairs; the core's bookkeeping
per block (hash, match, allocate, publish, free, evicting all the while) against a bare SHA-256
chain; and what tiers add to that, per request and per block: planning what is loaded, and placing
what is kept.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from foreword.cli.measure import (
    add_model_arguments,
    ask,
    engine_settings,
    forced,
    mean_interval,
    random_tokens,
)
from foreword.cli.settings import count, size
from foreword.core.block import BlockHash, Chain, token_key
from foreword.core.cache import KVCache, Refusal
from foreword.core.cost import Costs, StepCost, TierCost, TierFit
from foreword.core.lease import Lease
from foreword.core.plan import Present
from foreword.core.tier import Tier
from foreword.engine.engine import TorchEngine
from foreword.engine.settings import BLOCK_SIZE

NUM_BLOCKS = 2048
WARM_UP_PAIRS = 4  # after which the pool is full, as it is in a server that runs for a day
PLANNED = (10, 30, 100, 300, 1000, 2000)  # blocks of the prompts that are planned and placed
ROOT = BlockHash(bytes(32))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--kv-bytes",
        type=size,
        default="128MiB",
        help="the pool; so small that the uncounted runs fill it and the others evict",
    )
    parser.add_argument("--pairs", type=count, default=12)
    parser.add_argument("--prompts", type=count, default=4, help="of a run, at once")
    parser.add_argument("--prompt-tokens", type=count, default=512)
    parser.add_argument("--new-tokens", type=count, default=16)


class TimedCache:
    """Stands before a KVCache and adds up the CPU seconds of its calls."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.cpu_s = 0.0

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._cache, name)
        return self._timed(member) if callable(member) else member

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            begin_s = time.thread_time()
            result = call(*args, **named)
            self.cpu_s += time.thread_time() - begin_s
            return result

        return timed


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Keys: `cpu_share`, `cpu_ratio` (on / off, mean of pairs), `cpu_ratio_ci` (95 %),
    `us_per_block`, `sha_us_per_block`, `block_ratio`; `plan_request_us`, `plan_block_us`,
    `place_block_us` and `plan_sha_us_per_block`."""
    return {**bookkeeping(), **planning(), **asyncio.run(_engine_runs(args))}


def bookkeeping(rounds: int = 9) -> dict[str, Any]:
    """Medians of interleaved rounds over the same token ids; every round evicts the last one's."""
    draw = random.Random(0)
    cache = KVCache(NUM_BLOCKS, BLOCK_SIZE)
    ours, bare = [], []
    for number in range(rounds + 1):
        token_ids = [draw.randrange(1 << 16) for _ in range(NUM_BLOCKS * BLOCK_SIZE)]
        begin_s = time.process_time()
        admitted = cache.admit(Chain(ROOT, BLOCK_SIZE, token_ids))
        assert not isinstance(admitted, Refusal)
        cache.filled(admitted[0], len(token_ids))
        cache.release(admitted[0])
        ours_s = time.process_time() - begin_s
        key, parent, width = token_key(token_ids), bytes(ROOT), 4 * BLOCK_SIZE
        begin_s = time.process_time()
        for at in range(0, len(key), width):
            parent = sha256(parent + key[at : at + width]).digest()
        if number:  # the first finds an empty cache and evicts nothing
            ours.append(ours_s / NUM_BLOCKS * 1e6)
            bare.append((time.process_time() - begin_s) / NUM_BLOCKS * 1e6)
    ours_us, bare_us = statistics.median(ours), statistics.median(bare)
    return {
        "us_per_block": ours_us,
        "sha_us_per_block": bare_us,
        "block_ratio": statistics.median(a / b for a, b in zip(ours, bare, strict=True)),
    }


def planning(rounds: int = 41) -> dict[str, float]:
    """Prompts of PLANNED blocks are admitted, of which the device has none and two tiers have a
    half each: with known costs and, in turns, without, which loads all. What was computed of others
    is placed in two tiers with room and, in turns, in none. Of planning a straight line through the
    medians of the differences; the chain is that of the same prompts."""
    plan_us, place_us, sha_us = [], [], []
    for num_blocks in PLANNED:
        chain = _chain(num_blocks)
        planned, loaded = _with_tiers(_known_costs()), _with_tiers(None)
        for cache in (planned, loaded):
            _put(cache, chain)
        placed, bare = _with_tiers(None), KVCache(num_blocks + 1, BLOCK_SIZE)
        plan_us.append(_difference(_admit_us, planned, loaded, chain, rounds))
        place_us.append(_difference(_fill_us, placed, bare, chain, rounds) / num_blocks)
        sha_us.append(statistics.median(_sha_us(chain) for _ in range(rounds)) / num_blocks)
    plan = statistics.linear_regression(PLANNED, plan_us)
    return {
        "plan_request_us": plan.intercept,
        "plan_block_us": plan.slope,
        "place_block_us": statistics.median(place_us),
        "plan_sha_us_per_block": statistics.median(sha_us),
    }


def _difference(
    measure: Callable[[KVCache, Chain], float],
    one: KVCache,
    other: KVCache,
    chain: Chain,
    rounds: int,
) -> float:
    """Median over interleaved pairs."""
    pairs = []
    for number in range(rounds):
        took = {cache: measure(cache, chain) for cache in ((one, other), (other, one))[number % 2]}
        pairs.append(took[one] - took[other])
    return statistics.median(pairs)


def _known_costs() -> Costs:
    """As of the default model on a CPU; the numbers say only that both are worth a thought."""
    step = StepCost(8e-4, 1e-7, 5e-3, 1e-3, 4e-8, 7e-4)
    fits = [TierFit(TierCost(2e-4, 4e9), 2 << 20), TierFit(TierCost(1e-3, 1e9), 2 << 20)]
    return Costs(BLOCK_SIZE, 369_000, 2048, fits, step)


def _with_tiers(costs: Costs | None) -> KVCache:
    num_blocks = PLANNED[-1] + 1
    tiers = [Tier(num_blocks), Tier(num_blocks)]
    cache = KVCache(num_blocks, BLOCK_SIZE, tiers=tiers)
    cache.restores.costs = cache.lower.placement.costs = costs
    return cache


def _chain(num_blocks: int) -> Chain:
    draw = random.Random(num_blocks)
    return Chain(ROOT, BLOCK_SIZE, [draw.randrange(1 << 16) for _ in range(num_blocks * 16 + 1)])


def _put(cache: KVCache, chain: Chain) -> None:
    """Into both tiers: the first half in the fast one, all in the other."""
    for tier, stop in zip(cache.lower.tiers, (len(chain.hashes) // 2, None), strict=True):
        tier.restore(zip(chain.hashes[:stop], [chain.root, *chain.hashes], strict=False))


def _admit_us(cache: KVCache, chain: Chain) -> float:
    begin_ns = time.thread_time_ns()
    admitted = cache.admit(chain, present=Present(num_others=1))
    spent_us = (time.thread_time_ns() - begin_ns) / 1e3
    assert not isinstance(admitted, Refusal)
    cache.release(admitted[0])
    return spent_us


def _fill_us(cache: KVCache, chain: Chain) -> float:
    admitted = cache.admit(chain)
    assert not isinstance(admitted, Refusal)
    lease: Lease = admitted[0]
    begin_ns = time.thread_time_ns()
    cache.filled(lease, len(chain))
    cache.lower.take_effects()
    spent_us = (time.thread_time_ns() - begin_ns) / 1e3
    cache.release(lease)
    cache.clear()
    return spent_us


def _sha_us(chain: Chain) -> float:
    key, parent, width = bytes(chain.key), bytes(ROOT), 4 * BLOCK_SIZE
    begin_ns = time.thread_time_ns()
    for at in range(0, len(key) - width + 1, width):
        parent = sha256(parent + key[at : at + width]).digest()
    return (time.thread_time_ns() - begin_ns) / 1e3


async def _engine_runs(args: argparse.Namespace) -> dict[str, Any]:
    engines = [
        TorchEngine.load(
            engine_settings(args, prefix_caching=on, exact=False, kv_bytes=args.kv_bytes)
        )
        for on in (True, False)
    ]
    timed = TimedCache(engines[0].cache)
    engines[0].scheduler.cache = timed  # type: ignore[assignment]
    engines[0].cache = timed  # type: ignore[assignment]
    for engine in engines:
        engine.start()
    seconds: list[list[float]] = [[], []]
    share = []
    for pair in range(args.pairs + WARM_UP_PAIRS):
        for which in (0, 1) if pair % 2 else (1, 0):
            core_s = timed.cpu_s
            spent_s, hash_s = await _unshared(engines[which], pair, args)
            if pair >= WARM_UP_PAIRS:
                seconds[which].append(spent_s)
                if which == 0:
                    share.append((timed.cpu_s - core_s + hash_s) / spent_s)
    for engine in engines:
        await engine.stop(1.0)
    ratios = [on / off for on, off in zip(*seconds, strict=True)]
    return {
        "cpu_share": statistics.median(share),
        "cpu_ratio": statistics.fmean(ratios),
        "cpu_ratio_ci": mean_interval(ratios),
        "pairs": args.pairs,
        "cpu_s": {"on": statistics.median(seconds[0]), "off": statistics.median(seconds[1])},
    }


async def _unshared(
    engine: TorchEngine, seed: int, args: argparse.Namespace
) -> tuple[float, float]:
    """CPU seconds of one run, and of hashing its prompts, which both kinds of run do."""
    prompts = [
        random_tokens(1000 * seed + i, args.prompt_tokens, engine) for i in range(args.prompts)
    ]
    begin_s = time.thread_time()
    for prompt in prompts:
        Chain(ROOT, BLOCK_SIZE, prompt)
    hash_s = time.thread_time() - begin_s
    sampling = forced(engine, args.new_tokens)
    begin_s = time.process_time()
    await asyncio.gather(*(ask(engine, prompt, sampling) for prompt in prompts))
    return time.process_time() - begin_s, hash_s
