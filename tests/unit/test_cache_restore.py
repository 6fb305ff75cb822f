"""What a request loads and what it computes, when loads take their time."""

import pytest

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.cost import Costs, StepCost, TierCost, TierFit
from foreword.core.lease import Load
from foreword.core.place import WriteThrough
from foreword.core.plan import Present
from foreword.core.restore import PROBE_S
from foreword.core.scheduler import Scheduler
from foreword.core.sequence import Sequence
from foreword.core.tier import Tier
from laws import check_leases, check_pool

ROOT = BlockHash(b"root" * 8)
SIZE, BLOCK_BYTES = 4, 100
TOKENS = tuple(range(42))  # ten blocks and two tokens


def chain(tokens=TOKENS):
    return Chain(ROOT, SIZE, tokens)


def cache_with(*costs, token_s=0.01, tokens=TOKENS):
    """A cache whose tiers have a prompt that the device has not; a block takes 4 x `token_s` to
    compute, and costs say what the tiers take."""
    fits = [TierFit(cost, BLOCK_BYTES) for cost in costs]
    for fit in fits:
        fit.error = 0.0
    step = StepCost(token_s)
    cache = KVCache(32, SIZE, tiers=[Tier(32) for _ in costs], placement=WriteThrough)
    cache.restores.costs = Costs(SIZE, BLOCK_BYTES, 1000, fits, step)
    lease, _ = cache.admit(chain(tokens))
    cache.filled(lease, len(tokens) - lease.num_computed_tokens)
    for effect in cache.lower.take_effects():
        hashes = lease.chain.hashes[effect.start : effect.start + len(effect.block_ids)]
        cache.lower.stored(effect.tier, hashes, ok=True)
    cache.release(lease)
    filler, _ = cache.admit(Chain(BlockHash(b"else" * 8), SIZE, range(128)))
    cache.release(filler)
    for tier in cache.lower.tiers:
        tier.next_probe_s = 1000.0
    return cache


QUICK = TierCost(0.0, 1e9)
EQUAL = TierCost(0.0, BLOCK_BYTES / 0.04)  # a block takes as long as it takes to compute
SLOW = TierCost(0.0, BLOCK_BYTES / 1.0)


def computable(cache, lease, now_s):
    cache.tick(now_s)
    return cache.computable(lease)


def admit(cache, now_s):
    cache.tick(now_s)
    return cache.admit(chain())


def test_a_quick_tier_brings_all():
    cache = cache_with(QUICK)
    lease, [load] = cache.admit(chain())
    assert (load.start, load.stop, load.probe) == (0, 10, False)
    assert cache.computable(lease) == []
    cache.loaded(load, 0, 10)
    assert cache.computable(lease) == [(40, 42)]


def test_a_slow_tier_brings_nothing_that_takes_longer_than_to_compute_all():
    cache = cache_with(TierCost(0.5, 1e9))
    lease, loads = cache.admit(chain())
    assert loads == []
    assert cache.computable(lease) == [(0, 42)]
    assert lease.plan.total_s == lease.plan.recompute_s == pytest.approx(0.42)


def test_an_equal_tier_meets_the_device_in_the_middle():
    cache = cache_with(EQUAL)
    lease, [load] = cache.admit(chain())
    assert (load.start, load.stop) == (5, 10)
    assert cache.computable(lease) == [(0, 20)]
    assert lease.plan.total_s == pytest.approx(0.22)
    cache.loaded(load, 8, 10)
    cache.filled(lease, 20)
    assert computable(cache, lease, 0.1) == []
    cache.loaded(load, 5, 8)
    assert computable(cache, lease, 0.2) == [(40, 42)]
    assert (lease.num_reused_tokens, lease.restored) == (20, {0: 20})


def test_others_get_the_device_where_loading_is_quick_enough():
    cache = cache_with(EQUAL)
    lease, [load] = cache.admit(chain(), present=Present(num_others=3))
    assert (load.start, load.stop) == (0, 10), "20 tokens of computing would delay three others"
    assert cache.computable(lease) == []


def test_what_is_late_is_computed_with_the_rest_in_one_go_and_what_came_is_kept():
    cache = cache_with(EQUAL)
    lease, [load] = admit(cache, 5.0)
    cache.filled(lease, 20)
    cache.loaded(load, 9, 10)
    cache.loaded(load, 6, 8)
    late_s = lease.late_at_s
    assert late_s == pytest.approx(5.2, abs=0.01)
    assert computable(cache, lease, late_s - 0.001) == []
    while not (found := computable(cache, lease, lease.late_at_s)):
        assert lease.late_at_s > late_s, "it waits a little longer, as long as that may pay"
        late_s = lease.late_at_s
    assert late_s - 5 <= lease.plan.promised_s
    assert found == [(20, 24), (32, 36), (40, 42)]
    assert not load.awaits(5)
    assert not load.awaits(8)
    cache.lost(load, 5, 6, gone=False)
    for start, stop in found:
        assert lease.num_computed_tokens == start
        cache.filled(lease, stop - start)
    check_leases([lease], SIZE, [])
    check_pool(cache, [lease])


def test_nothing_is_waited_for_that_would_break_the_promise_in_vain():
    cache = cache_with(TierCost(0.0, BLOCK_BYTES / 0.01))
    lease, [load] = cache.admit(chain())
    front = load.start * SIZE
    cache.filled(lease, front)
    rest_s = 0.01 * (42 - front)
    while not (found := computable(cache, lease, at_s := lease.late_at_s)):
        assert lease.late_at_s + rest_s <= lease.plan.promised_s
    assert found == [(front, 42)]
    assert at_s + rest_s <= lease.plan.promised_s + 0.01


def test_each_tier_brings_its_own_part():
    cache = cache_with(QUICK, EQUAL)
    cache.lower.tiers[0].capacity = 4
    cache.lower.tiers[0].make_room()
    lease, loads = cache.admit(chain())
    assert [(load.tier, load.start, load.stop) for load in loads] == [(0, 0, 4), (1, 7, 10)]
    assert cache.computable(lease) == []
    cache.loaded(loads[0], 0, 4)
    assert cache.computable(lease) == [(16, 28)]


def test_a_tier_that_is_left_alone_is_tried_on_what_nobody_waits_for():
    cache = cache_with(TierCost(0.5, 1e9))
    cache.lower.tiers[0].next_probe_s = 7.0
    lease, loads = admit(cache, 6.9)
    assert loads == []
    cache = cache_with(TierCost(0.5, 1e9))
    cache.lower.tiers[0].next_probe_s = 7.0
    lease, [load] = admit(cache, 7.0)
    assert load == Load(lease, 0, 6, 10, probe=True)
    assert not any(map(load.awaits, range(6, 10)))
    assert cache.computable(lease) == [(0, 42)]
    cache.lost(load, 6, 10, gone=False)
    assert cache.lower.tiers[0].next_probe_s == 7.0 + PROBE_S


def test_a_disabled_tier_is_tried_and_not_waited_for():
    cache = cache_with(QUICK)
    cache.restores.switches[0].enabled = cache.lower.tiers[0].enabled = False
    cache.restores.switches[0]._until_s = 1.0
    cache.lower.tiers[0].next_probe_s = 0.0
    lease, [load] = cache.admit(chain())
    assert load.probe
    assert lease.plan.loads == ()
    assert cache.num_known(chain()) == 0


def test_before_steps_are_measured_all_is_loaded_however_long_it_takes():
    cache = cache_with(SLOW)
    cache.restores.costs.step = None
    lease, [load] = cache.admit(chain())
    assert (load.start, load.stop) == (0, 10)
    assert computable(cache, lease, 1e9) == []


def test_a_step_computes_all_gaps_of_a_sequence_that_its_budget_has_room_for():
    cache = cache_with(QUICK)
    scheduler = Scheduler(cache, 8, 100, 7)
    sequence = Sequence(chain())
    scheduler.add([sequence])
    [load] = scheduler.schedule().loads
    cache.loaded(load, 1, 2)
    cache.loaded(load, 3, 10)
    assert scheduler.schedule().work == []
    assert scheduler.next_late_s == sequence.lease.late_at_s
    cache.tick(10.0)
    step = scheduler.schedule()
    assert step.work == [(sequence, 0, 4), (sequence, 8, 3)]
    for _sequence, _start, num_tokens in step.work:
        assert not scheduler.settle(sequence, num_tokens)
    step = scheduler.schedule()
    assert step.work == [(sequence, 11, 1), (sequence, 40, 2)]
    assert [scheduler.settle(sequence, num) for *_, num in step.work] == [False, True]
    assert sequence.num_cached_tokens == 32
