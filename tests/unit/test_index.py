"""RadixIndex by itself, and what of it shows in the cache only in rare orders of calls."""

import random

import pytest

from foreword.core.block import BlockHash, BlockId, Chain, token_key
from foreword.core.cache import KVCache, Refusal
from foreword.core.events import BlockRemoved
from foreword.core.index import Node, RadixIndex
from foreword.core.lease import BlockState, Copy, Lease

ROOT = BlockHash(bytes(32))
SIZE = 4
WIDTH = SIZE * 4


def add(index: RadixIndex, token_ids: list[int], first_slot: int = 0) -> Node:
    """A run of full blocks below the root."""
    chain = Chain(ROOT, SIZE, token_ids)
    slots = [BlockId(first_slot + i) for i in range(len(chain.hashes))]
    return index.add(index.root(ROOT), list(chain.hashes), slots, bytes(chain.key))[0]


def admit(cache: KVCache, token_ids: list[int]) -> tuple[Lease, list[Copy]]:
    admitted = cache.admit(Chain(ROOT, SIZE, token_ids))
    assert not isinstance(admitted, Refusal)
    return admitted


def keep(cache: KVCache, token_ids: list[int]) -> list[int]:
    """Compute a prompt nobody shares and release it; its slots."""
    lease, effects = admit(cache, token_ids)
    assert not effects
    cache.filled(lease, len(token_ids))
    cache.release(lease)
    return lease.block_ids


def num_nodes(index: RadixIndex) -> int:
    found = list(index._roots.values())
    for node in found:
        found += node.sorted_children
    return len(found) - len(index._roots)


@pytest.mark.parametrize("num_blocks", range(1, 10))
def test_a_walk_ends_where_the_run_stops_agreeing(num_blocks: int) -> None:
    for shared in range(num_blocks + 1):
        index = RadixIndex(SIZE)
        tokens = list(range(num_blocks * SIZE))
        add(index, tokens)
        hashes = Chain(ROOT, SIZE, tokens[: shared * SIZE] + [99] * 8).hashes
        _node, slots = index.walk(index.root(ROOT), hashes, 0, len(hashes))
        assert slots == list(range(shared))
        assert num_nodes(index) == (2 if 0 < shared < num_blocks else 1), "one split is enough"


def test_nothing_shared_is_no_neighbour() -> None:
    index = RadixIndex(SIZE)
    node = add(index, [5, 6, 7, 8])
    root = index.root(ROOT)
    assert index.closest(root, token_key([9, 9])) is None
    assert index.closest(root, token_key([1, 1])) is None
    assert index.closest(root, token_key([5, 9])) == (node, 1)


def test_leaves_go_in_the_order_of_their_last_use() -> None:
    draw = random.Random(0)
    index = RadixIndex(SIZE)
    leaves = [add(index, [i] * SIZE, i) for i in range(12)]
    used: list[Node] = []  # oldest first
    for turn, leaf in enumerate([*leaves, *draw.choices(leaves, k=300)]):
        if turn % 40 > 30:
            leaf = index.pop_leaf()
            assert leaf is used[0]
        index.touch(leaf)
        used = [other for other in used if other is not leaf] + [leaf]
        assert len(index.order._queue) <= 3 * len(leaves) + 1, "stale candidates pile up"
    assert [index.pop_leaf() for _ in leaves] == used


def test_leaves_of_the_same_age_go_in_the_order_offered() -> None:
    index = RadixIndex(SIZE)
    leaves = [add(index, [i] * SIZE, i) for i in range(3)]
    for leaf in leaves:
        index.offer(leaf)
    assert [index.pop_leaf() for _ in leaves] == leaves


def test_an_inner_node_is_no_candidate() -> None:
    index = RadixIndex(SIZE)
    parent = add(index, [1, 2, 3, 4])
    child = index.add_partial(parent, BlockId(1), token_key([5]))
    assert child is not None
    index.touch(child[0])
    index.touch(parent)
    assert index.pop_leaf() is child[0]
    with pytest.raises(AssertionError, match="nothing can evict"):
        index.pop_leaf()


def test_a_redundant_block_is_no_candidate() -> None:
    index = RadixIndex(SIZE)
    partial = index.add_partial(index.root(ROOT), BlockId(7), token_key([1, 2]))
    assert partial is not None
    index.touch(partial[0])
    chain = Chain(ROOT, SIZE, [1, 2, 3, 4])
    _node, redundant = index.add(index.root(ROOT), chain.hashes, [BlockId(8)], bytes(chain.key))
    assert redundant == [7]
    with pytest.raises(AssertionError, match="nothing can evict"):
        index.pop_leaf()


def test_the_first_part_of_a_split_run_is_as_old_as_the_run() -> None:
    index = RadixIndex(SIZE)
    older, newer = add(index, [9] * SIZE, 9), add(index, list(range(8)))
    index.touch(older)
    index.touch(newer)
    head, _slots = index.walk(index.root(ROOT), newer.hashes, 0, 1)
    assert (index.pop_leaf(), index.pop_leaf()) == (older, newer)
    index.cut(newer, 1)
    index.offer(older)
    assert (index.pop_leaf(), index.pop_leaf()) == (older, head)


def test_cutting_one_of_two_neighbours_leaves_the_other() -> None:
    index = RadixIndex(SIZE)
    stays, goes = add(index, [1, 2, 3, 1], 0), add(index, [1, 2, 3, 2], 1)
    index.cut(goes, 1)
    assert index.covering(index.root(ROOT), token_key([1, 2, 3, 1])) is stays
    assert index.covering(index.root(ROOT), token_key([1, 2, 3, 2])) is None


def test_index_misuse_is_caught() -> None:
    index = RadixIndex(SIZE)
    parent = add(index, list(range(4)))
    index.add_partial(parent, BlockId(1), token_key([5]))
    longer = Chain(ROOT, SIZE, range(8))
    with pytest.raises(AssertionError):
        index.add(index.root(ROOT), longer.hashes, [BlockId(2), BlockId(3)], bytes(longer.key))
    for key in (b"", token_key(range(SIZE))):
        with pytest.raises(AssertionError):
            index.add_partial(parent, BlockId(2), key)
    with pytest.raises(AssertionError):
        index.cut(parent, 1)
    with pytest.raises(AssertionError):
        Chain(ROOT, 0)


def test_a_copy_comes_from_the_first_block_of_a_longer_run() -> None:
    cache = KVCache(8, SIZE)
    slots = keep(cache, list(range(12)))
    _lease, effects = admit(cache, [0, 1, 77])
    assert [(copy.source, copy.num_tokens) for copy in effects] == [(slots[0], 2)]


def test_a_copy_source_passed_over_by_eviction_can_be_evicted_later() -> None:
    cache = KVCache(6, SIZE)
    keep(cache, [0] * SIZE)
    keep(cache, [1] * SIZE)
    copying, effects = admit(cache, [0, 0, 5])
    assert effects
    filling, _ = admit(cache, [2] * 16)  # finds the oldest leaf pinned and takes the next
    cache.filled(copying, 2)
    cache.filled(copying, 1)
    cache.release(copying)
    cache.release(filling)
    admit(cache, [3] * 24)
    assert cache.pool.num_free == 0


def test_giving_up_a_copy_asks_for_no_more_than_is_missing() -> None:
    cache = KVCache(4, SIZE)
    keep(cache, list(range(8)))
    lease, effects = admit(cache, [*range(6), *[70] * 10])
    assert not effects, "source and copy do not fit"
    assert (lease.num_reused_tokens, len(lease.block_ids)) == (4, 4)


def test_an_unfinished_block_has_the_computed_tokens_only() -> None:
    cache = KVCache(4, SIZE)
    lease, _ = admit(cache, [1, 2])
    cache.filled(lease, 2)
    lease.chain.extend((3,))
    cache.publish_end(lease)
    (node,) = cache.index.root(ROOT).sorted_children
    assert node.key == token_key([1, 2])


def test_answers_are_plain() -> None:
    assert [(state.name, state.value) for state in BlockState] == [
        ("BLANK", 0),
        ("LOADING", 1),
        ("READY", 2),
    ]
    cache = KVCache(1, SIZE)
    lease, _ = admit(cache, [1])
    assert cache.extend(lease, 5) is False
    assert cache.clear() is False
    cache.release(lease)
    with pytest.raises(AssertionError):
        cache.filled(lease, 1)


def test_a_cut_takes_the_end_of_a_run_and_says_so() -> None:
    index = RadixIndex(SIZE)
    leaf = add(index, list(range(12)))
    hashes = list(leaf.hashes)
    assert index.cut(leaf, 2) == (hashes[1:], [1, 2])
    assert (leaf.hashes, leaf.block_ids, leaf.key) == (hashes[:1], [0], token_key(range(SIZE)))
    assert index.pop_leaf() is leaf
    assert index.cut(leaf, 1) == (hashes[:1], [0])
    assert index._roots == {}, "a root that lost all its children is forgotten"


def test_removed_blocks_are_told_children_first() -> None:
    cache = KVCache(3, SIZE, record_events=True)
    keep(cache, list(range(12)))
    hashes = Chain(ROOT, SIZE, range(12)).hashes
    cache.take_events()
    admit(cache, [9] * 8)
    assert cache.take_events() == [BlockRemoved((hashes[2], hashes[1]))]
