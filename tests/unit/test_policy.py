"""Policies: the order that each promises, on the device and below."""

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.policy import FIFO, LRU, Policy, Ranked
from foreword.core.tier import Tier

ROOT = BlockHash(b"r" * 32)


def used(cache: KVCache, tokens: list[int]) -> int:
    """One request from beginning to end; how many of its tokens were reused."""
    admitted = cache.admit(Chain(ROOT, 1, [*tokens, 99]))
    assert not isinstance(admitted, Refusal)
    lease, _effects = admitted
    num_reused = lease.num_reused_tokens
    cache.filled(lease, len(tokens) - num_reused)
    cache.release(lease)
    return num_reused


def test_lru_keeps_what_was_used_and_fifo_what_came_last() -> None:
    for policy, survivor in ((LRU, 1), (FIFO, 2)):
        cache = KVCache(3, 1, policy=policy)
        for token in (1, 2, 1, 3):
            used(cache, [token])
        assert used(cache, [survivor]) == 1, policy.name


def test_a_policy_that_looks_at_each_block_cuts_a_run_where_its_rank_ends() -> None:
    chain = Chain(ROOT, 1, [1, 2, 3])
    ranks = dict(zip(chain.hashes, (5.0, 4.0, 0.0), strict=True))
    other = Chain(ROOT, 1, [7]).hashes[0]
    ranks[other] = 3.0
    policy = Policy(
        "ranked",
        lambda _capacity, _tokens: Ranked(
            lambda _a, _u, of: ranks.get(of, 9.0) if of else -1.0, by_run=False
        ),
    )
    cache = KVCache(5, 1, policy=policy)
    used(cache, [1, 2, 3])
    used(cache, [7])
    used(cache, [8, 9])  # evicts the third block, then 7, and not the second block
    assert [h in cache.index.root(ROOT).children for h in (chain.hashes[0], other)] == [True, False]
    assert used(cache, [1, 2, 3]) == 2


def test_a_tier_passes_over_the_parent_of_what_comes() -> None:
    tier = Tier(2, policy=FIFO)
    parent, other, child = (BlockHash(bytes([i]) * 32) for i in range(3))
    for block_hash in (parent, other):
        assert tier.claim(block_hash, ROOT)
        tier.stored(block_hash)
    assert tier.make_room(protected=parent) == [other]
    assert tier.claim(child, parent)
    assert tier.make_room(protected=child) == []
    assert not tier.claim(other, ROOT)


def test_a_new_offer_replaces_the_old_one() -> None:
    order: Ranked[str] = Ranked(lambda _added, last_used, _hash: last_used)
    order.offer("a", 1, 1, ())
    order.offer("b", 2, 2, ())
    order.offer("a", 1, 3, ())
    assert [order.pop(), order.pop(), order.pop()] == ["b", "a", None]
    order.offer("a", 1, 1, ())
    order.withdraw("a")
    assert order.pop() is None


def test_older_offers_go_when_they_are_more_than_the_leaves() -> None:
    order: Ranked[str] = Ranked(lambda _added, last_used, _hash: last_used)
    order.offer("b", 0, 0, ())
    sizes = []
    for used_at in range(8):
        order.offer("a", 0, used_at, ())
        sizes.append(len(order._queue))
    assert sizes == [2, 3, 4, 5, 2, 3, 4, 5]
    assert [order.pop(), order.pop(), order.pop()] == ["b", "a", None]
