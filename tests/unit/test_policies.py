"""Each policy by examples of what leaves first, and the queue that they wait in."""

from collections.abc import Iterable
from random import Random

import pytest

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.policies import POLICIES
from foreword.core.policies.gittins import Gittins
from foreword.core.policies.runs import RunOrder
from foreword.core.policy import LRU, Policy, Queue
from foreword.core.tier import Tier
from laws import check_index, check_tier

ROOT = BlockHash(b"r" * 32)


def used(cache: KVCache, tokens: Iterable[int], now_s: float | None = None) -> int:
    """One request; how many of its blocks, which are a token each, were known."""
    if now_s is not None:
        cache.tick(now_s)
    admitted = cache.admit(Chain(ROOT, 1, [*tokens, 99]))
    assert not isinstance(admitted, Refusal)
    lease, _ = admitted
    known = lease.num_reused_tokens
    cache.filled(lease, len(lease.chain) - 1 - known)
    cache.release(lease)
    check_index(cache)
    return known


def kept(cache: KVCache, *firsts: int) -> list[int]:
    """Which of these are there, as whole prompts of one block."""
    return [one for one in firsts if cache.num_known(Chain(ROOT, 1, [one, 98]))]


def test_lru_2_keeps_what_was_used_twice() -> None:
    cache = KVCache(5, 1, policy=POLICIES["lru-2"])
    for one in (1, 1, 2, 3, 4, 5):
        used(cache, [one])
    assert kept(cache, 1, 2, 3, 4, 5) == [1, 3, 4, 5]
    used(cache, [2])
    assert kept(cache, 1, 2, 3, 4, 5) == [1, 2, 4, 5]
    for one in range(10, 20):
        used(cache, [one])
    assert kept(cache, 1, 2, 4, 5) == [1, 2], "2 came again while its ghost was there"


def test_lru_2_goes_by_the_use_before_the_last() -> None:
    cache = KVCache(4, 1, policy=POLICIES["lru-2"])
    for now_s, one in enumerate((1, 2, 2, 1, 3, 3)):
        used(cache, [one], float(now_s))
    used(cache, [4], 9.0)
    assert kept(cache, 1, 2, 3, 4) == [2, 3, 4], "1 was used last of these two, and first before"


def test_arc_gives_room_to_what_its_ghosts_ask_for() -> None:
    cache = KVCache(5, 1, policy=POLICIES["arc"])
    for one in (1, 1, 2, 2, 3, 4, 5):  # 1 and 2 again, the others once
        used(cache, [one])
    assert kept(cache, 1, 2, 3, 4, 5) == [1, 2, 4, 5]
    order = cache.index.order
    used(cache, [3])  # a ghost of what was used once: that has too little room
    assert order._room == 1.0  # type: ignore[attr-defined]
    used(cache, [6])
    used(cache, [7])
    used(cache, [8])
    assert kept(cache, 1) == [], "room for one that was used once is left"


def test_s3_fifo_sends_scans_away_and_keeps_what_came_again() -> None:
    cache = KVCache(11, 1, policy=POLICIES["s3-fifo"])
    for one in (1, 1, 1, 2, 2, 2):
        used(cache, [one])
    for one in range(10, 40):
        used(cache, [one])
    assert kept(cache, 1, 2) == [1, 2]
    assert kept(cache, 10, 39) == [39]
    used(cache, [29])  # still in the queue of ghosts
    for one in range(50, 60):
        used(cache, [one])
    assert kept(cache, 29, 1) == [29, 1]


def test_gittins_is_lru_before_it_knows_anything() -> None:
    draw = Random(1)
    ours, lru = (KVCache(9, 1, policy=policy) for policy in (POLICIES["gittins"], LRU))
    for now_s in range(400):
        prompt = [draw.randrange(9)] * draw.randint(1, 2)
        assert used(ours, prompt, float(now_s)) == used(lru, prompt)


def test_gittins_lets_what_a_session_went_on_without_go_first() -> None:
    """Chats strip their last answer and go on; a page of documents is read once."""
    cache = KVCache(60, 1, policy=Policy("gittins", Gittins, 512))
    number = 1000
    for turn in range(1500):
        chat = turn % 4
        history = [chat, *(10_000 * chat + at for at in range(turn // 4 % 12))]
        used(cache, [*history, number, number + 1], float(turn))
        number += 2
    index = cache.index.order._index  # type: ignore[attr-defined]
    assert max(index[-1]) < min(max(row) for row in index[-6:-1]), "the superseded are worth least"
    assert used(cache, [0, 10_000 * 0 + 0], 1501.0) == 2


def test_a_tier_learns_from_the_same_uses() -> None:
    tier = Tier(4, policy=POLICIES["lru-2"])
    for name in (b"a", b"b", b"c", b"d"):
        block_hash = BlockHash(name * 32)
        assert tier.claim(block_hash, ROOT)
        tier.stored(block_hash)
        tier.touch([block_hash], 1)
        check_tier(tier)
    tier.touch([BlockHash(b"a" * 32)], 1)
    assert tier.make_room(protected=ROOT) == [BlockHash(b"b" * 32)]
    check_tier(tier)


def test_ghosts_are_bounded_and_end_when_they_come_again() -> None:
    cache = KVCache(6, 1, policy=POLICIES["gittins"])
    order = cache.index.order
    assert isinstance(order, RunOrder)
    for first in range(100):
        used(cache, [first, first, first, first])
        assert sum(order.num_ghosts) <= 4 * 6 + 4
    before = sum(order.num_ghosts)
    assert used(cache, [97, 97, 97, 97]) == 0
    assert order._runs[next(reversed(order._runs))].num_uses >= 2
    assert sum(order.num_ghosts) <= before


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_is_a_sorted_list_and_stays_small(seed: int) -> None:
    draw, offers, serial = Random(seed), dict[int, int](), 0
    queue = Queue(offers)
    ranks: dict[int, tuple[float, int]] = {}
    for _ in range(3000):
        key, serial = draw.randrange(60), serial + 1
        if draw.random() < 0.7:
            ranks[key] = (float(draw.randrange(50)), serial)
            queue.offer(key, *ranks[key])
        elif draw.random() < 0.5:
            offers.pop(key, None)
            ranks.pop(key, None)
        first = queue.first()
        expected = min(((*rank, key) for key, rank in ranks.items()), default=None)
        assert first == expected
        if first and draw.random() < 0.1:
            del offers[first[2]], ranks[first[2]]
        assert len(queue) <= 3 * 60 + 3
