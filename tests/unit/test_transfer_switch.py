"""A tier that is turned off: who asks is told why, nobody waits for it, and it is tried."""

import logging
import time

import pytest
import torch

from foreword.core import switch
from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.cost import Costs, StepCost, TierCost, TierFit
from foreword.core.place import WriteThrough
from foreword.core.stats import EngineStats
from foreword.core.switch import WINDOW
from foreword.core.tier import Tier
from foreword.engine import transfer
from foreword.engine.kv import LayerShape, PagedKV
from foreword.engine.transfer import Transfer
from foreword.server.metrics import exposition
from foreword.store.codec import record_bytes
from foreword.store.host import HostStore
from foreword.store.throttled import ThrottledStore

SIZE, KV_BYTES = 4, 4 * 2 * 2 * 8 * 4
PROMPT = Chain(BlockHash(b"root" * 8), SIZE, range(41))


@pytest.fixture
def world(monkeypatch):
    """A store that is as slow as asked, below a cache that knows what steps cost."""
    monkeypatch.setattr(transfer, "TRY_S", 0.0)
    monkeypatch.setattr(switch, "PAUSE_S", (0.3, 0.3))
    kv = PagedKV([LayerShape(1, 8, 8, None)] * 2, 40, SIZE, torch.float32, torch.device("cpu"))
    size = record_bytes(SIZE, KV_BYTES)
    store = ThrottledStore(HostStore(100 * size, size), TierCost(0.0, 1e9))
    cache = KVCache(40, SIZE, tiers=[Tier(100)], placement=WriteThrough)
    fit = TierFit(TierCost(0.5, 1e9), size)
    cache.restores.costs = Costs(SIZE, size, 1000, [fit], StepCost(1.0))
    moves = Transfer(cache, kv, [store], 10, lambda: None)
    yield cache, moves, store
    moves.close(5.0)


def settle(cache, moves, until):
    end_s = time.monotonic() + 10
    while not until():
        assert time.monotonic() < end_s
        cache.tick(time.monotonic())
        moves.settle(0.0)
        time.sleep(0.002)


def fill(cache, moves):
    lease, _ = cache.admit(PROMPT)
    cache.filled(lease, len(PROMPT))
    moves.perform(cache.lower.take_effects())
    settle(cache, moves, lambda: moves.stats[0].num_stored_blocks == 10)
    cache.release(lease)
    other, _ = cache.admit(Chain(BlockHash(b"else" * 8), SIZE, range(40 * SIZE)))
    cache.release(other)


def serve(cache, moves):
    """A request that is to get its blocks from the tier."""
    cache.tick(time.monotonic())
    lease, loads = cache.admit(PROMPT)
    moves.perform(loads)
    settle(cache, moves, lambda: cache.computable(lease))
    for start, stop in cache.computable(lease):
        cache.filled(lease, stop - start)
    cache.restores.judge(lease)
    return lease


def test_what_is_off_is_tried_without_requests_and_says_so(world, caplog):
    cache, moves, _store = world
    fill(cache, moves)
    lease = serve(cache, moves)
    assert lease.restored
    ledger = moves.stats[0].ledger
    assert 0 < ledger.planned_s < ledger.recompute_s
    assert ledger.regret_s.counts[0] == 1
    for _ in range(WINDOW):  # more than the one request won
        cache.restores.switches[0].judge(time.monotonic(), -50.0, 0)
    cache.restores.tiers[0].enabled = cache.restores.switches[0].enabled
    with caplog.at_level(logging.WARNING, "foreword.engine"):
        settle(cache, moves, lambda: not moves.lanes[0].enabled)
        assert caplog.messages[-1].startswith(f"host: turned off: the last {WINDOW} requests lost")
        shown = exposition(EngineStats(tiers=moves.stats)).decode()
        assert 'foreword_tier_enabled{tier="host"} 0.0' in shown
        assert 'foreword_restore_regret_seconds_count{tier="host"} 1.0' in shown
        settle(cache, moves, lambda: moves.lanes[0].enabled)
    assert "host: turned on again: a request would be" in caplog.messages[-1]
    assert (
        'foreword_tier_enabled{tier="host"} 1.0'
        in exposition(EngineStats(tiers=moves.stats)).decode()
    )
