"""The worked example of docs/architecture.md."""

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.events import BlockRemoved
from foreword.core.lease import Copy, Lease

ROOT = BlockHash(bytes(32))
OPENING = list(range(100, 114))


def admit(cache: KVCache, token_ids: list[int]) -> tuple[Lease, list[Copy]]:
    admitted = cache.admit(Chain(ROOT, cache.block_size, token_ids))
    assert not isinstance(admitted, Refusal)
    return admitted


def test_ten_blocks() -> None:
    cache = KVCache(10, 4, record_events=True)
    pool = cache.pool

    a, effects = admit(cache, OPENING)
    assert (a.block_ids, effects) == ([0, 1, 2, 3], [])
    cache.filled(a, 14)
    assert a.num_published == 3
    for sampled, has_kv in ((1, True), (2, True), (3, False)):
        a.chain.extend((sampled,))
        assert cache.extend(a, len(a.chain))
        if has_kv:
            cache.filled(a, 1)
    assert (a.num_computed_tokens, a.num_published) == (16, 4)
    assert a.block_ids == [0, 1, 2, 3, 4]
    cache.release(a)
    assert (pool.num_idle, pool.num_blank, pool.num_free) == (4, 6, 10)

    b, effects = admit(cache, [*OPENING[:10], 7, 8, 9])
    assert (b.block_ids, effects) == ([0, 1, 4, 5], [Copy(2, 4, 2)])
    assert b.num_reused_tokens == 10
    assert pool.num_leased == 5
    cache.filled(b, 2)
    assert (pool.num_leased, pool.num_idle, pool.num_free) == (4, 2, 6)
    cache.filled(b, 3)

    known = list(a.chain.hashes)
    cache.take_events()
    c, effects = admit(cache, list(range(500, 524)))
    assert (sorted(c.block_ids), effects) == ([2, 3, 6, 7, 8, 9], [])
    assert cache.take_events() == [BlockRemoved((known[3], known[2]))]

    assert cache.admit(Chain(ROOT, 4, [1])) is Refusal.NO_ROOM
    assert pool.num_free == 0
