"""BlockPool by example."""

import pytest

from foreword.core.pool import BlockPool


def test_slots_start_blank_and_are_taken_in_order():
    pool = BlockPool(4)
    assert (pool.num_blocks, pool.num_blank, pool.num_free, pool.num_leased) == (4, 4, 4, 0)
    assert pool.take(3) == [0, 1, 2]
    assert (pool.num_blank, pool.num_free, pool.num_leased) == (1, 1, 3)
    assert pool.take(0) == []
    assert pool.take(1) == [3]


def test_returned_neighbours_are_taken_again_in_order():
    pool = BlockPool(4)
    taken = pool.take(4)
    pool.unpin(taken)
    assert pool.take(4) == [0, 1, 2, 3]


def test_a_cached_slot_is_idle_not_blank():
    pool = BlockPool(2)
    taken = pool.take(2)
    pool.keep(taken[:1])
    pool.unpin(taken)
    assert (pool.num_idle, pool.num_blank, pool.num_free) == (1, 1, 2)
    pool.pin(taken[:1])
    assert (pool.num_idle, pool.num_leased, pool.pins) == (0, 1, [1, 0])
    pool.pin(taken[:1])
    pool.unpin(taken[:1])
    assert (pool.num_idle, pool.pins) == (0, [1, 0])
    pool.unpin(taken[:1])
    pool.drop(taken[:1])
    assert (pool.num_idle, pool.num_blank) == (0, 2)


def test_dropping_a_leased_slot_waits_for_its_lease():
    pool = BlockPool(1)
    taken = pool.take(1)
    pool.keep(taken)
    pool.drop(taken)
    assert (pool.num_blank, pool.num_leased) == (0, 1)
    pool.unpin(taken)
    assert (pool.num_blank, pool.num_idle) == (1, 0)


def test_dropped_neighbours_are_taken_again_in_order():
    pool = BlockPool(3)
    taken = pool.take(3)
    pool.keep(taken)
    pool.unpin(taken)
    pool.drop(taken)
    assert pool.take(3) == [0, 1, 2]


def test_idle_at_end_stops_at_the_first_pin_and_at_the_limit():
    pool = BlockPool(5)
    taken = pool.take(5)
    pool.unpin(taken[2:])
    assert pool.num_idle_at_end(taken, 5) == 3
    assert pool.num_idle_at_end(taken, 2) == 2
    assert pool.num_idle_at_end(taken[:2], 5) == 0
    assert pool.num_idle_at_end(taken[2:], 9) == 3


def test_misuse_is_caught():
    with pytest.raises(AssertionError):
        BlockPool(0)
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="evict"):
        pool.take(3)
    with pytest.raises(AssertionError):
        pool.take(-1)
    with pytest.raises(AssertionError, match="cached"):
        pool.pin([0])
    with pytest.raises(AssertionError, match="leased"):
        pool.keep([0])
    with pytest.raises(AssertionError, match="cached"):
        pool.drop([0])
    with pytest.raises(AssertionError, match="more often"):
        pool.unpin([0])
