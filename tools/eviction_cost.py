"""What eviction policies cost: CPU of the core per block of a trace, beside LRU in the same run.

    python tools/eviction_cost.py conversation.jsonl.gz --blocks 160000 --tier 320000

Each request of a trace is admitted, filled, released and stored in a cache of each policy in turn.
Ids of a trace stand for `--parts` blocks each: 32 make 16-token blocks of a trace of 512-token ids.
The longest calls are those of one request as a whole, `used` is the policy's part of it, by the
thread's CPU clock; what a busy machine adds to them, another run does not show.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.lease import Load, Store
from foreword.core.policies import POLICIES
from foreword.core.tier import Tier
from foreword.sim.importer import read_trace
from foreword.sim.prompt import MARK

ROOT = BlockHash(bytes(32))


class Timed:
    """A cache, and what its policy's calls took."""

    def __init__(self, name: str, num_blocks: int, tier_blocks: int, block_tokens: int) -> None:
        policy = replace(POLICIES[name], block_tokens=block_tokens)
        tiers = [Tier(tier_blocks, policy=policy)] if tier_blocks else []
        self.cache = KVCache(num_blocks, 1, tiers=tiers, policy=policy)
        self.num_hits = 0
        self.request_s: list[float] = []
        self.calls: list[float] = []
        for order in (self.cache.index.order, *(tier.order for tier in tiers)):
            for method in ("used", "offer", "pop", "removed"):
                setattr(order, method, self._timed(getattr(order, method)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            begin_s = time.thread_time()
            result = call(*args, **named)
            self.calls.append(time.thread_time() - begin_s)
            return result

        return timed if args.calls else call

    def serve(self, chain: Chain, now_s: float) -> None:
        cache, begin_s = self.cache, time.thread_time()
        cache.tick(now_s)
        admitted = cache.admit(chain)
        assert not isinstance(admitted, Refusal)
        lease, effects = admitted
        for effect in effects:
            assert isinstance(effect, Load)
            cache.loaded(effect, effect.start, effect.stop)
        cache.filled(lease, len(chain) - 1 - lease.num_computed_tokens)
        cache.release(lease)
        self.num_hits += lease.num_reused_tokens
        for store in cache.lower.take_effects():
            if isinstance(store, Store):
                stop = store.start + len(store.block_ids)
                cache.lower.stored(store.tier, store.chain.hashes[store.start : stop], ok=True)
        self.request_s.append(time.thread_time() - begin_s)


def chains() -> Iterable[tuple[Chain, float]]:
    with read_trace(args.trace) as trace:
        for number, record in enumerate(trace):
            if number == args.requests:
                return
            ids = [one * args.parts + part for one in record.ids for part in range(args.parts)]
            yield Chain(ROOT, 1, [*ids, MARK]), record.arrival_s


def main() -> None:
    with read_trace(args.trace) as trace:
        block_tokens = max(1, trace.id_tokens // args.parts)
    made = [Timed(name, args.blocks, args.tier, block_tokens) for name in args.policy.split(",")]
    num_blocks = 0
    gc.disable()
    for chain, now_s in chains():
        num_blocks += len(chain)
        for timed in made:
            timed.serve(chain, now_s)
    print(f"{num_blocks:,} blocks of {block_tokens} tokens")
    print(
        f"{'policy':10}{'hits %':>8}{'us/block':>10}{'beside':>8}{'longest request ms':>20}", end=""
    )
    print(f"{'longest call ms':>17}" if args.calls else "")
    first = sum(made[0].request_s)
    for timed, name in zip(made, args.policy.split(","), strict=True):
        each = sum(timed.request_s)
        figures = (each / num_blocks * 1e6, (each - first) / num_blocks * 1e6)
        print(f"{name:10}{100 * timed.num_hits / num_blocks:8.2f}", end="")
        print(f"{figures[0]:10.2f}{figures[1]:8.2f}{max(timed.request_s) * 1e3:20.2f}", end="")
        print(f"{max(timed.calls) * 1e3:17.2f}" if args.calls else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policy", default="lru,gittins")
    parser.add_argument("--blocks", type=int, default=160_000)
    parser.add_argument("--tier", type=int, default=0)
    parser.add_argument("--parts", type=int, default=32)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--calls", action="store_true", help="time each call of a policy, too")
    args = parser.parse_args()
    main()
