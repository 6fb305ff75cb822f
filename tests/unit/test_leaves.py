"""Times to live, pins and quotas: in the device and in a tier, under every policy."""

from collections.abc import Iterable, Sequence

import pytest

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.errors import PinsFull
from foreword.core.lease import Store
from foreword.core.leaves import NO_TERM, Term
from foreword.core.policies import POLICIES
from foreword.core.policy import LRU, Policy
from foreword.core.request import Hints
from foreword.core.tier import Tier
from laws import check_index, check_tier

ROOT, OTHER = BlockHash(b"r" * 32), BlockHash(b"o" * 32)
ALL = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))


def chain(tokens: Iterable[int], root: BlockHash = ROOT) -> Chain:
    return Chain(root, 1, [*tokens, 99])


def use(
    cache: KVCache, tokens: Sequence[int], now_s: float, ttl_s: float = 0.0, root: BlockHash = ROOT
) -> int:
    """One request; how many of its blocks, a token each, were known."""
    cache.tick(now_s)
    admitted = cache.admit(chain(tokens, root))
    assert not isinstance(admitted, Refusal)
    lease, effects = admitted
    for effect in effects:
        cache.loaded(effect, effect.start, effect.stop)  # type: ignore[arg-type, union-attr]
    known = lease.num_computed_tokens
    cache.filled(lease, len(lease.chain) - 1 - known)
    lease.hints = Hints(ttl_s=ttl_s)
    cache.release(lease)
    for store in cache.lower.take_effects():
        if isinstance(store, Store):
            stop = store.start + len(store.block_ids)
            cache.lower.stored(store.tier, store.chain.hashes[store.start : stop], ok=True)
    check_index(cache)
    for tier in cache.lower.tiers:
        check_tier(tier)
    return known


def known(cache: KVCache, tokens: Iterable[int], root: BlockHash = ROOT) -> int:
    return cache.num_known(chain(tokens, root))


@ALL
def test_what_has_time_left_stays_while_others_can_leave(policy: Policy) -> None:
    cache = KVCache(8, 1, policy=policy)
    use(cache, [1, 2], 0.0, ttl_s=300.0)
    for number in range(10, 40):
        use(cache, [number, number], float(number))
    assert known(cache, [1, 2]) == 2
    assert use(cache, [5] * 7, 41.0) == 0, "a request takes what it needs, the kept ones too"
    assert known(cache, [1, 2]) == 0


@ALL
def test_what_has_no_time_left_leaves_first(policy: Policy) -> None:
    cache = KVCache(8, 1, policy=policy)
    use(cache, [1, 2], 0.0, ttl_s=300.0)
    use(cache, [3], 1.0)
    use(cache, [4], 2.0, ttl_s=3600.0)
    assert use(cache, [1, 2], 299.0) == 2, "a use begins the time anew"
    use(cache, [5, 6], 598.0)
    assert known(cache, [1, 2]) == 2
    use(cache, [7, 7, 7], 600.0)
    assert [known(cache, [1, 2]), known(cache, [3]), known(cache, [4])] == [0, 1, 1]


def test_a_use_after_the_time_is_as_any_other() -> None:
    cache = KVCache(5, 1, policy=LRU)
    use(cache, [1], 0.0, ttl_s=10.0)
    use(cache, [2], 1.0)
    assert use(cache, [1], 20.0) == 1
    use(cache, [3], 21.0)
    use(cache, [4], 22.0)
    use(cache, [5], 23.0)
    assert [known(cache, [one]) for one in (1, 2)] == [1, 0]


@ALL
def test_a_block_is_kept_as_long_as_what_follows_it(policy: Policy) -> None:
    cache = KVCache(9, 1, policy=policy)
    use(cache, [1, 2], 0.0, ttl_s=10.0)
    use(cache, [1, 2, 3, 4], 1.0, ttl_s=3600.0)
    use(cache, [1, 8], 2.0)
    for number in range(10, 30):
        use(cache, [number, number], 100.0 + number)
    assert known(cache, [1, 2, 3, 4]) == 4
    assert known(cache, [1, 8]) == 1


def test_terms_end_with_the_longest() -> None:
    term = NO_TERM.renewed(300.0, 10.0)
    assert term == Term(310.0, 300.0)
    assert term.renewed(0.0, 100.0) == Term(400.0, 300.0)
    assert term.renewed(3600.0, 100.0) == Term(3700.0, 3600.0)
    assert term.renewed(5.0, 100.0) == Term(400.0, 300.0)
    assert term.renewed(5.0, 310.0) == Term(315.0, 5.0)
    assert term.renewed(0.0, 310.0) == NO_TERM


@ALL
def test_tiers_keep_times_and_quotas_too(policy: Policy) -> None:
    cache = KVCache(4, 1, tiers=[Tier(6, policy=policy)], policy=policy)
    cache.limit(OTHER, [3, 2])
    use(cache, [1, 2], 0.0, ttl_s=300.0)
    tier = cache.lower.tiers[0]
    for number in range(10, 30):
        use(cache, [number, number], float(number))
        use(cache, [number], float(number), root=OTHER)
        assert tier.leaves.tenants[OTHER].num_blocks <= 2
    assert known(cache, [1, 2]) == 2
    assert use(cache, [1, 2], 30.0) == 2, "the tier has them"
    use(cache, [7, 7], 1000.0)
    use(cache, [8, 8], 1001.0)
    use(cache, [9, 9], 1002.0)
    assert known(cache, [1, 2]) == 0


@ALL
def test_a_tenant_pushes_nobody_out_beyond_its_quota(policy: Policy) -> None:
    cache = KVCache(9, 1, policy=policy)
    cache.limit(OTHER, [3])
    use(cache, [1, 2], 0.0)
    use(cache, [3, 4, 5], 1.0)
    for number in range(10, 40):
        use(cache, [number, number], float(number), root=OTHER)
    assert (known(cache, [1, 2]), known(cache, [3, 4, 5])) == (2, 3)
    assert cache.index.leaves.tenants[OTHER].num_blocks <= 3


def test_what_is_beyond_a_quota_leaves_before_the_oldest() -> None:
    cache = KVCache(9, 1, policy=LRU)
    cache.limit(OTHER, [2])
    use(cache, [1, 2], 0.0)
    use(cache, [5, 6, 7, 8], 1.0, root=OTHER)  # a request has what it needs
    assert cache.index.leaves.tenants[OTHER].num_blocks == 4
    use(cache, [3, 4], 2.0)
    use(cache, [9], 3.0)
    assert known(cache, [1, 2]) == 2
    assert known(cache, [5, 6, 7, 8], OTHER) < 4


def test_quotas_hold_after_all_is_forgotten_and_after_a_restart() -> None:
    cache = KVCache(9, 1, tiers=[Tier(9)])
    cache.limit(OTHER, [2, 2])
    use(cache, [5, 6], 0.0, root=OTHER)
    assert cache.clear()
    for number in range(5):
        use(cache, [number, number], float(number), root=OTHER)
    assert cache.lower.tiers[0].leaves.tenants[OTHER].num_blocks == 2
    again = Tier(9)
    again.leaves.limit(OTHER, 2)
    hashes = chain([1, 2, 3], OTHER).hashes
    again.restore(zip(reversed(hashes), [*reversed(hashes[:-1]), OTHER], strict=True))
    assert again.leaves.tenants[OTHER].num_blocks == 4
    assert len(again.make_room(hashes[0])) == 3, "until one more fits the quota"
    check_tier(again)


@ALL
def test_what_is_pinned_stays_with_all_before_it(policy: Policy) -> None:
    cache = KVCache(12, 1, policy=policy)
    use(cache, [1, 2, 3, 4], 0.0)
    assert cache.pin(Chain(ROOT, 1, [1, 2])) == 2
    assert cache.pin(Chain(ROOT, 1, [1, 2])) == 2
    assert cache.pool.num_leased == 2
    for number in range(10, 40):
        use(cache, [number] * 5, float(number))
    assert known(cache, [1, 2, 3, 4]) == 2
    with pytest.raises(PinsFull, match="5 blocks would be pinned, and 3 of the device's 12 may be"):
        cache.pin(Chain(ROOT, 1, [39, 39, 39]))
    assert cache.unpin(Chain(ROOT, 1, [1, 2]))
    assert not cache.unpin(Chain(ROOT, 1, [1, 2]))
    for number in range(40, 70):
        use(cache, [number] * 5, float(number))
    assert known(cache, [1, 2]) == 0
    assert cache.pin(Chain(ROOT, 1, [1, 2])) == 0


def test_pins_end_when_all_is_forgotten() -> None:
    cache = KVCache(12, 1)
    use(cache, [1, 2, 3], 0.0)
    cache.pin(Chain(ROOT, 1, [1, 2, 3]))
    assert cache.clear()
    assert cache.pool.num_free == 12
    assert not cache.unpin(Chain(ROOT, 1, [1, 2, 3]))
