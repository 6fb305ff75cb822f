"""What the cache asks of tiers, and what it makes of their answers."""

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.lease import BlockState, Copy, Drop, Load, Probe, Store
from foreword.core.tier import Tier
from laws import check_index, check_leases, check_pool, check_tier

ROOT = BlockHash(b"root" * 8)


def chain(*tokens):
    return Chain(ROOT, 2, tokens)


def num_computable(cache, lease):
    return sum(stop - start for start, stop in cache.computable(lease))


def cache_with(*tiers, num_blocks=8):
    return KVCache(num_blocks, 2, tiers=tiers)


def run(cache, *tokens):
    """Compute a prompt, store what the cache wants stored, release."""
    lease, effects = cache.admit(chain(*tokens))
    for copy in effects:
        assert isinstance(copy, Copy)
        cache.filled(lease, copy.num_tokens)
    cache.filled(lease, len(tokens) - lease.num_computed_tokens)
    stores = cache.lower.take_effects()
    for effect in stores:
        if isinstance(effect, Store):
            hashes = effect.chain.hashes[effect.start :][: len(effect.block_ids)]
            cache.lower.stored(effect.tier, hashes, ok=True)
    cache.release(lease)
    return stores


def forget(cache):
    """Evict all from the device."""
    size = cache.pool.num_blocks * cache.block_size
    lease, _ = cache.admit(Chain(BlockHash(b"else" * 8), 2, range(size)))
    cache.release(lease)


def test_full_blocks_are_stored_when_published():
    cache = cache_with(Tier(9), Tier(9))
    lease, _ = cache.admit(chain(1, 2, 3, 4, 5))
    cache.filled(lease, 3)
    stores = [Store(tier, lease.chain, 0, (lease.block_ids[0],)) for tier in (0, 1)]
    assert cache.lower.take_effects() == stores
    assert cache.lower.take_effects() == []
    cache.filled(lease, 2)
    stores = [Store(tier, lease.chain, 1, (lease.block_ids[1],)) for tier in (0, 1)]
    assert cache.lower.take_effects() == stores
    cache.release(lease)
    assert cache.lower.take_effects() == [], "an unfinished block is for the device only"


def test_what_was_evicted_is_loaded_and_can_be_used_by_others():
    cache = cache_with(Tier(9))
    run(cache, 1, 2, 3, 4, 5, 6, 7)
    forget(cache)
    lease, [load] = cache.admit(chain(1, 2, 3, 4, 5, 6, 7))
    assert load == Load(lease, 0, 0, 3)
    assert lease.states == bytes([1, 1, 1, 0])
    assert num_computable(cache, lease) == 0
    assert cache.admit(chain(1, 2, 3, 4, 9)) is Refusal.PASSED_OVER
    check_leases([lease], 2, [(load, 0, 3)])
    cache.loaded(load, 0, 1)
    assert (lease.num_computed_tokens, lease.num_reused_tokens, lease.restored) == (2, 2, {0: 2})
    cache.loaded(load, 1, 3)
    assert num_computable(cache, lease) == 1
    other, effects = cache.admit(chain(1, 2, 3, 4, 9))
    assert (effects, other.num_reused_tokens, other.restored) == ([], 4, {})
    check_pool(cache, [lease, other])
    check_index(cache)
    assert cache.lower.take_effects() == [], "the tier has them still"


def test_the_last_token_is_computed_though_a_tier_has_its_block():
    cache = cache_with(Tier(9))
    run(cache, 1, 2, 3, 4, 5)
    forget(cache)
    lease, [load] = cache.admit(chain(1, 2, 3, 4))
    assert (load.start, load.stop) == (0, 1)
    cache.loaded(load, 0, 1)
    assert num_computable(cache, lease) == 2


def test_blocks_that_come_out_of_order_leave_a_gap_to_compute():
    cache = cache_with(Tier(9))
    run(cache, *range(9))
    forget(cache)
    lease, [load] = cache.admit(chain(*range(9)))
    cache.loaded(load, 3, 4)
    assert (lease.num_computed_tokens, num_computable(cache, lease)) == (0, 0)
    cache.lost(load, 0, 2, gone=False)
    assert num_computable(cache, lease) == 4, "up to the block that may come yet"
    cache.filled(lease, 3)
    assert num_computable(cache, lease) == 1
    cache.filled(lease, 1)
    assert num_computable(cache, lease) == 0
    cache.lost(load, 2, 3, gone=False)
    assert cache.computable(lease) == [(4, 6), (8, 9)], "the gap, and what is after block 3"
    cache.filled(lease, 2)
    assert lease.num_computed_tokens == 8, "over the block that came early"
    assert (lease.num_published, lease.num_reused_tokens) == (4, 2)
    check_leases([lease], 2)


def test_what_is_gone_is_stored_again():
    tier = Tier(9)
    cache = cache_with(tier)
    run(cache, *range(7))
    forget(cache)
    lease, [load] = cache.admit(chain(*range(7)))
    cache.loaded(load, 0, 1)
    cache.lost(load, 1, 2, gone=True)
    cache.loaded(load, 2, 3)
    assert cache.lower.take_effects() == [Drop(0, (lease.chain.hashes[1],))]
    check_tier(tier)
    cache.filled(lease, 2)
    assert cache.lower.take_effects() == [Store(0, lease.chain, 1, (lease.block_ids[1],))]
    cache.lower.stored(0, [lease.chain.hashes[1]], ok=True)
    assert tier.num_ready(lease.chain.hashes, 0, 3) == 3


def test_each_run_comes_from_the_fastest_tier_that_has_it():
    fast, slow = Tier(2), Tier(9)
    cache = cache_with(fast, slow)
    run(cache, *range(9))
    assert fast.num_blocks == 2
    forget(cache)
    lease, loads = cache.admit(chain(*range(9)))
    assert loads == [Load(lease, 0, 0, 2), Load(lease, 1, 2, 4)]
    cache.release(lease)
    cache.lost(loads[0], 0, 2, gone=False)
    fast.reads = False
    lease, loads = cache.admit(chain(*range(9)))
    assert loads == [Load(lease, 1, 0, 4)]
    cache.release(lease)
    slow.reads = False
    lease, loads = cache.admit(chain(*range(9)))
    assert loads == []


def test_a_partial_block_is_copied_where_no_tier_has_it_whole():
    cache = cache_with(Tier(9))
    run(cache, 1, 2, 3, 4, 5)
    lease, [copy] = cache.admit(chain(1, 2, 3, 4, 5, 6))
    assert isinstance(copy, Copy)
    cache.release(lease)
    tier = cache.lower.tiers[0]
    tier.restore([(chain(1, 2, 3, 4, 5, 6).hashes[2], chain(1, 2, 3, 4).hashes[1])])
    lease, [load] = cache.admit(chain(1, 2, 3, 4, 5, 6, 7))
    assert (load.start, load.stop) == (2, 3)
    assert lease.states[2] == BlockState.LOADING


def test_a_shared_tier_is_asked_for_what_nothing_nearer_has():
    own, shared = Tier(9), Tier(9, shared=True)
    cache = cache_with(own, shared)
    asked = chain(1, 2, 3, 4, 5)
    assert cache.probe(asked) == [Probe(1, asked, 0)]
    run(cache, 1, 2, 3)
    assert cache.probe(asked) == [Probe(1, asked, 1)]
    run(cache, 1, 2, 3, 4, 5)
    assert cache.probe(asked) == []
    forget(cache)
    assert cache.probe(asked) == [], "both tiers have it"
    shared.reads = False
    other = chain(7, 7, 7)
    assert cache.probe(other) == []


def test_what_others_have_is_loaded_and_not_stored_again():
    tier = Tier(9, shared=True)
    cache = cache_with(tier)
    lease, [load] = cache.admit(chain(*range(9)), elsewhere={0: 3})
    assert (load.start, load.stop) == (0, 3)
    cache.loaded(load, 0, 2)
    assert cache.lower.take_effects() == []
    cache.lost(load, 2, 3, gone=True)
    assert cache.lower.take_effects() == [Drop(0, (lease.chain.hashes[2],))]
    cache.filled(lease, 5)
    assert cache.lower.take_effects() == [Store(0, lease.chain, 2, tuple(lease.block_ids[2:4]))]
    check_tier(tier)


def test_a_store_that_failed_is_tried_again_and_dropped_in_between():
    tier = Tier(9)
    cache = cache_with(tier)
    lease, _ = cache.admit(chain(*range(7)))
    cache.filled(lease, 4)
    [store] = cache.lower.take_effects()
    cache.lower.stored(0, lease.chain.hashes[:2], ok=False)
    assert cache.lower.take_effects() == [Drop(0, tuple(lease.chain.hashes[:2]))]
    tier.writes = False
    cache.filled(lease, 2)
    assert cache.lower.take_effects() == []
    tier.writes = True
    cache.release(lease)
    [store] = cache.lower.take_effects()
    assert (store.start, len(store.block_ids)) == (0, 3), "the last call is at its end"
    cache.lower.stored(0, lease.chain.hashes[:3], ok=False)
    cache.lower.take_effects()
    lease, _ = cache.admit(chain(*range(9)))
    cache.filled(lease, 9 - lease.num_computed_tokens)
    [store] = cache.lower.take_effects()
    assert (store.start, len(store.block_ids)) == (0, 4)


def test_room_is_made_before_a_store():
    tier = Tier(2)
    cache = cache_with(tier)
    run(cache, 1, 2, 3)
    run(cache, 5, 6, 7)
    drop, store = run(cache, 8, 9, 7)
    assert drop == Drop(0, (chain(1, 2).hashes[0],))
    assert store.start == 0
    cache.lower.resize(0, 1)
    assert cache.lower.take_effects() == [Drop(0, (chain(5, 6).hashes[0],))]
    cache.lower.resize(0, 5)
    assert cache.lower.take_effects() == []


def test_a_prompt_that_the_device_knows_counts_as_used_below():
    tier = Tier(2)
    cache = cache_with(tier)
    run(cache, 1, 2, 3)
    run(cache, 5, 6, 7)
    run(cache, 1, 2, 4)
    [drop, _] = run(cache, 8, 9, 7)
    assert drop == Drop(0, (chain(5, 6).hashes[0],))


def test_without_reuse_there_are_no_tiers():
    cache = KVCache(8, 2, reuse=False, tiers=[Tier(9)])
    assert run(cache, 1, 2, 3, 4, 5) == []
    assert cache.probe(chain(1, 2, 3)) == []


def test_who_must_see_every_token_computed_loads_nothing():
    cache = cache_with(Tier(9))
    run(cache, 1, 2, 3, 4, 5)
    forget(cache)
    lease, effects = cache.admit(chain(1, 2, 3, 4, 5), match=False)
    assert effects == []
    assert num_computable(cache, lease) == 5


def test_clear_empties_the_tiers():
    tier = Tier(9)
    cache = cache_with(tier)
    run(cache, 1, 2, 3, 4, 5)
    assert cache.clear()
    assert cache.lower.take_effects() == [Drop(0, tuple(chain(1, 2, 3, 4).hashes))]
    assert tier.num_blocks == 0


def test_a_released_lease_wants_nothing_more():
    cache = cache_with(Tier(9))
    run(cache, 1, 2, 3, 4, 5)
    forget(cache)
    lease, [load] = cache.admit(chain(1, 2, 3, 4, 5))
    cache.release(lease)
    cache.lost(load, 0, 2, gone=True)
    assert cache.lower.take_effects() == [Drop(0, tuple(lease.chain.hashes))]
    assert cache.pool.num_leased == 0
