"""KVCache by example: what is reused, what is evicted first, what each request is told."""

import pytest

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache, Refusal
from foreword.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from foreword.core.lease import BlockState, Copy
from laws import check_index, check_pool

ROOT = BlockHash(bytes(32))
OTHER = BlockHash(b"o" * 32)


def chain(*tokens, root=ROOT):
    return Chain(root, 4, tokens)


def admit(cache, tokens, root=ROOT):
    """Admit, do the copy, compute the rest. Returns the lease."""
    lease, copies = cache.admit(chain(*tokens, root=root))
    for copy in copies:
        cache.filled(lease, copy.num_tokens)
    cache.filled(lease, len(tokens) - lease.num_computed_tokens)
    return lease


def use(cache, tokens, root=ROOT):
    """One whole request. Returns how many tokens it reused."""
    lease = admit(cache, tokens, root)
    cache.release(lease)
    check_pool(cache, [])
    check_index(cache)
    return lease.num_reused_tokens


def test_a_cold_request_computes_all_and_leases_whole_blocks():
    cache = KVCache(8, 4)
    lease, copies = cache.admit(chain(*range(9)))
    assert copies == []
    assert lease.block_ids == [0, 1, 2]
    assert (lease.num_reused_tokens, lease.num_computed_tokens) == (0, 0)
    cache.filled(lease, 5)
    assert list(lease.states) == [BlockState.READY, BlockState.BLANK, BlockState.BLANK]
    cache.filled(lease, 4)
    assert list(lease.states) == [BlockState.READY, BlockState.READY, BlockState.BLANK]


@pytest.mark.parametrize("shared", range(1, 12))
def test_reuse_ends_at_any_token(shared):
    cache = KVCache(8, 4)
    use(cache, range(12))
    assert use(cache, [*range(shared), 99, 98]) == shared


def test_a_known_prompt_computes_its_last_token_only():
    cache = KVCache(8, 4)
    use(cache, range(8))
    lease, copies = cache.admit(chain(*range(8)))
    assert lease.num_reused_tokens == 7
    assert copies == [Copy(1, lease.block_ids[1], 3)]
    assert list(lease.states) == [BlockState.READY, BlockState.LOADING]
    cache.filled(lease, 3)
    assert list(lease.states) == [BlockState.READY, BlockState.BLANK]
    cache.filled(lease, 1)
    assert list(lease.states) == [BlockState.READY, BlockState.READY]
    assert lease.block_ids == [0, 1], "the block that was there first is the one that stays"
    check_pool(cache, [lease])


def test_a_known_prompt_that_ends_with_a_block_waits_for_nobody():
    cache = KVCache(16, 4)
    use(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    leases = []
    for _ in range(4):
        lease, copies = cache.admit(chain(1, 2, 3, 4, 5, 6, 7, 8))
        assert [copy.num_tokens for copy in copies] == [3]
        leases.append(lease)
    check_pool(cache, leases)


def test_the_longest_common_run_wins():
    cache = KVCache(16, 4)
    use(cache, [1, 2, 3, 3])
    use(cache, [1, 2, 5, 5])
    use(cache, [1, 7, 7, 7])
    assert use(cache, [1, 2, 3, 9, 9]) == 3
    assert use(cache, [1, 2, 9, 9, 9]) == 2
    assert use(cache, [1, 7, 7, 9]) == 3


def test_an_unfinished_block_is_copied_from_never_extended():
    cache = KVCache(8, 4)
    use(cache, [1, 2, 3, 4, 5, 6])
    lease, copies = cache.admit(chain(1, 2, 3, 4, 5, 6, 7))
    assert [copy.num_tokens for copy in copies] == [2]
    assert copies[0].source not in lease.block_ids
    cache.filled(lease, 2)
    cache.filled(lease, 1)
    cache.release(lease)
    check_index(cache)
    assert cache.pool.num_idle == 2, "the shorter unfinished block is redundant"


def test_a_full_block_makes_its_unfinished_beginning_redundant():
    cache = KVCache(8, 4)
    use(cache, [1, 2])
    assert use(cache, [1, 2, 3, 4, 5]) == 2
    assert cache.pool.num_idle == 2


def test_an_unfinished_block_that_another_covers_is_not_kept():
    cache = KVCache(8, 4)
    use(cache, [1, 2, 3, 4])
    use(cache, [1, 2])
    assert cache.pool.num_idle == 1


def test_salts_share_nothing():
    cache = KVCache(8, 4)
    use(cache, range(6))
    assert use(cache, range(6), OTHER) == 0
    assert use(cache, range(6), OTHER) == 5


def test_least_recently_used_goes_first_and_from_its_end():
    cache = KVCache(6, 4)
    use(cache, [1] * 8)
    use(cache, [2] * 8)
    use(cache, [1] * 8)
    use(cache, [3] * 12)
    assert use(cache, [1] * 8) == 7
    use(cache, [4] * 8)
    assert use(cache, [2] * 8) == 0


def test_a_parent_outlives_its_children():
    cache = KVCache(5, 4)
    use(cache, [1, 1, 1, 1, 2, 2, 2, 2])
    use(cache, [1, 1, 1, 1, 3, 3, 3, 3])
    use(cache, [9] * 12)
    assert use(cache, [1, 1, 1, 1, 3, 3, 3, 3]) == 7
    cache = KVCache(3, 4)
    use(cache, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    use(cache, [9] * 4)
    assert use(cache, [1, 1, 1, 1, 2, 2, 2, 2, 5]) == 8


def test_leased_blocks_are_never_evicted():
    cache = KVCache(4, 4)
    lease = admit(cache, [1] * 8)
    assert cache.admit(chain(*[2] * 12)) is Refusal.NO_ROOM
    check_pool(cache, [lease])
    for other in (2, 3):
        second = admit(cache, [other] * 8)
        check_pool(cache, [lease, second])
        check_index(cache)
        cache.release(second)
    cache.release(lease)
    assert use(cache, [1] * 8) == 7


def test_a_full_cache_leaves_all_memory_to_requests():
    empty, full = KVCache(8, 4), KVCache(8, 4)
    for start in range(0, 1000, 100):
        use(full, range(start, start + 13))
    assert full.pool.num_free == 8
    for cache in (empty, full):
        leases = [admit(cache, range(n, n + 8)) for n in (2000, 3000, 4000, 5000)]
        assert len(leases) == 4
        assert cache.admit(chain(6000)) is Refusal.NO_ROOM


def test_without_room_for_source_and_copy_the_copy_is_given_up():
    cache = KVCache(2, 4)
    use(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    lease, copies = cache.admit(chain(1, 2, 9, 9, 9))
    assert (copies, lease.num_reused_tokens) == ([], 0)
    check_pool(cache, [lease])


def test_extend_grows_by_blocks_or_changes_nothing():
    cache = KVCache(2, 4)
    lease = admit(cache, [1, 2, 3])
    assert cache.extend(lease, 4)
    assert len(lease.block_ids) == 1
    assert cache.extend(lease, 5)
    assert (len(lease.block_ids), list(lease.states)) == (2, [0, 0])
    assert not cache.extend(lease, 9)
    assert len(lease.block_ids) == 2


def test_one_leads_and_the_others_are_passed_over_until_it_publishes():
    cache = KVCache(16, 4)
    leader, _ = cache.admit(chain(*range(12), 20))
    assert cache.admit(chain(*range(12), 30)) is Refusal.PASSED_OVER
    assert not isinstance(cache.admit(chain(70, 71, 72, 73, 74)), Refusal)
    cache.filled(leader, 4)
    assert cache.admit(chain(*range(12), 30)) is Refusal.PASSED_OVER
    follower, copies = cache.admit(chain(0, 1, 2, 3, 4, 5, 99))
    assert (follower.num_reused_tokens, copies) == (4, [])
    cache.filled(leader, 8)
    follower, _ = cache.admit(chain(*range(12), 30))
    assert follower.num_reused_tokens == 12


def test_when_the_leader_goes_the_next_one_leads():
    cache = KVCache(16, 4)
    leader, _ = cache.admit(chain(*range(8)))
    cache.release(leader)
    lease, _ = cache.admit(chain(*range(8)))
    assert lease.num_reused_tokens == 0
    assert cache.admit(chain(*range(8))) is Refusal.PASSED_OVER
    check_pool(cache, [lease])


def test_two_that_computed_the_same_block_end_up_sharing_it():
    cache = KVCache(8, 4)
    left, right = admit(cache, [1, 2, 3]), admit(cache, [1, 2, 3])
    for lease in (left, right):
        lease.chain.extend((4, 5))
        assert cache.extend(lease, 5)
        cache.filled(lease, 1)
    assert left.block_ids[0] == right.block_ids[0]
    check_pool(cache, [left, right])
    check_index(cache)
    for lease in (left, right):
        cache.release(lease)
    check_pool(cache, [])


def test_samples_start_from_a_prompt_that_is_still_leased():
    cache = KVCache(8, 4)
    first = admit(cache, [1, 2, 3, 4, 5, 6])
    cache.publish_end(first)
    second, copies = cache.admit(chain(1, 2, 3, 4, 5, 6))
    assert (second.num_reused_tokens, copies[0].source) == (5, first.block_ids[1])
    cache.release(first)
    check_pool(cache, [second])
    cache.filled(second, 1)
    cache.filled(second, 1)
    cache.release(second)
    check_pool(cache, [])
    check_index(cache)


def test_a_request_cancelled_before_its_copy_leaks_nothing():
    cache = KVCache(8, 4)
    use(cache, range(6))
    lease, copies = cache.admit(chain(*range(6), 7))
    assert copies
    cache.release(lease)
    check_pool(cache, [])
    check_index(cache)
    assert use(cache, range(6)) == 5


def test_without_reuse_it_only_hands_out_memory():
    cache = KVCache(4, 4, reuse=False, record_events=True)
    assert use(cache, range(8)) == 0
    assert use(cache, range(8)) == 0
    assert cache.pool.num_blank == 4
    first, _ = cache.admit(chain(*range(8)))
    second, _ = cache.admit(chain(*range(8)))
    cache.publish_end(first)
    assert (first.num_reused_tokens, second.num_reused_tokens) == (0, 0)
    assert cache.take_events() == []


def test_without_match_all_is_computed_and_held_once():
    cache = KVCache(16, 4)
    use(cache, range(10))
    leader, _ = cache.admit(chain(*range(10), 50, 51, 52))
    lease, copies = cache.admit(chain(*range(13)), match=False)
    assert copies == []
    assert (lease.num_reused_tokens, lease.num_computed_tokens) == (0, 0)
    assert not set(lease.block_ids) & {0, 1, 2}
    cache.filled(lease, 13)
    assert lease.block_ids[:2] == [0, 1], "what it computed was known, and is held once"
    cache.release(leader)
    cache.release(lease)
    check_pool(cache, [])
    check_index(cache)
    assert use(cache, [*range(13), 60]) == 13


def test_without_match_nobody_is_waited_for_and_others_wait_for_it():
    cache = KVCache(16, 4)
    first, _ = cache.admit(chain(*range(9)))
    second, _ = cache.admit(chain(*range(9)), match=False)
    cache.release(first)
    third, _ = cache.admit(chain(*range(8), 70), match=False)
    cache.filled(second, 4)
    cache.filled(third, 4)
    assert third.block_ids[0] == second.block_ids[0]
    for lease in (second, third):
        cache.release(lease)
    check_pool(cache, [])


def test_evicted_blocks_are_counted():
    cache = KVCache(4, 4)
    use(cache, range(16))
    assert cache.num_evicted_blocks == 0
    use(cache, range(100, 112))
    assert cache.num_evicted_blocks == 3
    use(cache, range(200, 208))
    assert cache.num_evicted_blocks == 5


def test_events_tell_what_can_be_reused():
    cache = KVCache(3, 4, record_events=True)
    use(cache, range(10))
    hashes = chain(*range(10)).hashes
    assert cache.take_events() == [BlockStored(tuple(hashes), None, tuple(range(8)), 4)]
    use(cache, [*range(4), 50, 51, 52, 53])
    events = cache.take_events()
    assert events == [
        BlockStored((chain(*range(4), 50, 51, 52, 53).hashes[1],), hashes[0], (50, 51, 52, 53), 4)
    ]
    use(cache, [60] * 4)
    removed = [event for event in cache.take_events() if isinstance(event, BlockRemoved)]
    assert removed == [BlockRemoved((hashes[1],))]
    assert cache.take_events() == []
    silent = KVCache(3, 4)
    use(silent, range(10))
    assert silent.take_events() == []


def test_clear_forgets_all_but_refuses_while_leased():
    cache = KVCache(4, 4, record_events=True)
    lease = admit(cache, range(8))
    assert not cache.clear()
    cache.release(lease)
    assert cache.clear()
    assert cache.take_events()[-1] == AllBlocksCleared()
    assert use(cache, range(8)) == 0


def test_misuse_is_caught():
    cache = KVCache(4, 4)
    with pytest.raises(AssertionError):
        cache.admit(chain())
    lease = admit(cache, range(6))
    with pytest.raises(AssertionError):
        cache.filled(lease, 1)
    cache.release(lease)
    with pytest.raises(AssertionError, match="twice"):
        cache.release(lease)
    with pytest.raises(AssertionError):
        cache.filled(lease, 0)
    lease, (copy,) = cache.admit(chain(*range(6), 9))
    with pytest.raises(AssertionError, match="copy"):
        cache.filled(lease, copy.num_tokens + 1)
