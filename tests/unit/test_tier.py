"""What leaves a tier first, and what it remembers of what it lost."""

from copy import deepcopy
from random import Random

import pytest

from foreword.core.block import BlockHash
from foreword.core.policy import LRU
from foreword.core.tier import Kept, Tier
from laws import check_tier

ROOT = BlockHash(b"root" * 8)


def name(letter):
    return BlockHash(letter.encode() * 32)


def filled(tier, *chains):
    """Store chains such as "abc", parents first; what left on the way."""
    gone = []
    for chain in chains:
        parent = ROOT
        for letter in chain:
            if not tier.num_kept([name(letter)], 0, 1):
                gone += tier.make_room(protected=parent)
                if not tier.claim(name(letter), parent):
                    return gone
                tier.stored(name(letter))
            parent = name(letter)
    check_tier(tier)
    return gone


def hashes(chain):
    return [name(letter) for letter in chain]


def test_the_least_recent_leaf_leaves_first():
    tier = Tier(5, policy=LRU)
    assert filled(tier, "abc", "ax") == []
    tier.touch(hashes("abc"), 3)
    assert tier.num_blocks == 4
    assert filled(tier, "p") == []
    assert filled(tier, "q") == [name("x")], "c was used since"
    assert filled(tier, "r") == [name("c")], "then c's turn: older than p and q"
    assert filled(tier, "s") == [name("b")], "b is as old as its child was"
    check_tier(tier)
    assert tier.num_ready(hashes("abc"), 0, 3) == 1


def test_a_parent_counts_as_used_when_its_child_was():
    tier = Tier(4, policy=LRU)
    filled(tier, "ab", "cd")
    tier.touch(hashes("ab"), 2)
    assert filled(tier, "e") == [name("d")]
    assert filled(tier, "f") == [name("c")]
    assert filled(tier, "g") == [name("b")]
    tier.touch(hashes("a"), 1)
    assert filled(tier, "h") == [name("e")]


def test_a_chain_longer_than_the_tier_keeps_its_front():
    tier = Tier(2, policy=LRU)
    assert filled(tier, "abcd") == []
    assert tier.num_ready(hashes("abcd"), 0, 4) == 2
    assert filled(tier, "abcd") == []
    check_tier(tier)


def test_what_is_being_written_is_kept_but_not_ready():
    tier = Tier(4, policy=LRU)
    assert tier.claim(name("a"), ROOT)
    assert (tier.num_kept(hashes("a"), 0, 1), tier.num_ready(hashes("a"), 0, 1)) == (1, 0)
    tier.stored(name("a"))
    assert tier.num_ready(hashes("a"), 0, 1) == 1
    tier.stored(name("never claimed"[0]))
    tier.remove(name("b"))
    check_tier(tier)


def test_a_loss_hides_the_children_until_it_is_stored_again():
    tier = Tier(9, policy=LRU)
    filled(tier, "abcd")
    tier.remove(name("b"))
    check_tier(tier)
    assert tier.num_ready(hashes("abcd"), 0, 4) == 1
    assert tier.num_ready(hashes("abcd"), 2, 4) == 2, "c and d are there, out of reach"
    assert tier.num_blocks == 3
    filled(tier, "abcd")
    assert tier.num_ready(hashes("abcd"), 0, 4) == 4
    tier.remove(name("b"))
    tier.remove(name("c"))
    tier.remove(name("c"))
    assert tier.num_blocks == 2
    assert tier.make_room() == []
    tier.capacity = 0
    assert tier.make_room() == [name("a"), name("d")] or tier.num_blocks == 0
    check_tier(tier)
    assert not tier._entries, "nothing is remembered of what is gone"


def test_a_child_whose_parent_others_store():
    """The parent is not ours: it may be known later, and then has its child."""
    tier = Tier(9, policy=LRU)
    assert tier.claim(name("c"), name("b"))
    check_tier(tier)
    assert tier.num_ready(hashes("bc"), 0, 2) == 0
    filled(tier, "ab")
    tier.stored(name("c"))
    assert tier.num_ready(hashes("abc"), 0, 3) == 3
    tier.capacity = 2
    assert tier.make_room() == [name("c")]


def test_a_reopened_tier_keeps_its_order():
    tier = Tier(3, policy=LRU)
    tier.restore([(name("c"), name("b")), (name("b"), name("a")), (name("a"), ROOT)])
    check_tier(tier)
    assert tier.num_ready(hashes("abc"), 0, 3) == 3
    assert filled(tier, "x") == [name("c")]
    assert filled(tier, "y") == [name("b")]


def test_clear_tells_what_there_was():
    tier = Tier(9, policy=LRU)
    filled(tier, "abc", "x")
    tier.remove(name("b"))
    assert sorted(tier.clear()) == sorted(hashes("acx"))
    assert tier.num_blocks == 0
    check_tier(tier)
    filled(tier, "abc")
    assert tier.num_ready(hashes("abc"), 0, 3) == 3


def test_no_block_is_claimed_twice():
    tier = Tier(9, policy=LRU)
    filled(tier, "a")
    with pytest.raises(AssertionError, match="kept already"):
        tier.claim(name("a"), ROOT)


def test_many_uses_leave_no_heap_behind():
    tier = Tier(8, policy=LRU)
    filled(tier, "abcd")
    for _ in range(1000):
        tier.touch(hashes("abcd"), 4)
    assert len(tier.order._queue) <= 3 * len(tier._entries) + 1
    check_tier(tier)


def test_what_lost_its_child_counts_as_used_when_that_was():
    tier = Tier(3, policy=LRU)
    filled(tier, "ab", "x")
    tier.touch(hashes("ab"), 2)
    tier.remove(name("b"))
    assert filled(tier, "y") == []
    assert filled(tier, "z") == [name("x")], "a was used later, through b"


def held(letters):
    return lambda block_hash: block_hash in hashes(letters)


def test_take_passes_over_what_is_held_and_all_above_it():
    tier = Tier(9, policy=LRU)
    filled(tier, "abc", "axy", "p")
    assert tier.take(2, held("cp")) == [name("y"), name("x")]
    check_tier(tier)
    assert tier.take(1, held("cp")) is None, "c is held, and so a and b cannot leave"
    assert tier.take(0, held("cp")) == []
    assert tier.num_blocks == 4
    check_tier(tier)
    assert tier.take(4, held("")) == hashes("cbap"), "what was passed over is as old as before"
    assert (tier.num_blocks, tier._entries) == (0, {})


def test_take_of_too_much_changes_nothing():
    tier = Tier(9, policy=LRU)
    assert tier.claim(name("d"), name("c"))
    filled(tier, "ab", "p", "abc")
    tier.remove(name("c"))
    filled(tier, "q")
    before = deepcopy(tier._entries)
    assert tier.take(5, held("q")) is None
    assert tier.take(6, held("")) is None
    check_tier(tier)
    assert tier.num_blocks == 5
    assert tier._entries[name("d")].kept is Kept.WRITING
    assert {h: (e.parent, e.kept, e.num_children) for h, e in tier._entries.items()} == {
        h: (e.parent, e.kept, e.num_children) for h, e in before.items()
    }
    assert tier.take(5, held("")) == hashes("dpbaq"), "b counts as used when c was"


@pytest.mark.parametrize("seed", range(60))
def test_take_removes_as_many_single_ones_would_or_none(seed):
    """Beside it: blocks taken one by one from a copy, which is all or nothing by hand."""
    random = Random(seed)
    tier = Tier(40, policy=LRU)
    for _ in range(60):
        chain = [random.choice("abc") for _ in range(random.randint(1, 6))]
        keys = [name("-".join(chain[: at + 1]))[:32] for at in range(len(chain))]
        parent = ROOT
        for key in keys:
            if not tier.num_kept([key], 0, 1) and random.random() < 0.9:
                tier.claim(key, parent)
            parent = key
        tier.touch(keys, len(keys))
        if random.random() < 0.3:
            tier.remove(random.choice(keys))
        kept = [h for h, entry in tier._entries.items() if entry.kept is not Kept.ABSENT]
        pinned = set(random.sample(sorted(kept), min(len(kept), random.randint(0, 4))))
        count = random.randint(0, 6)
        copy, expected = deepcopy(tier), []
        while len(expected) < count and (one := copy.take(1, pinned.__contains__)):
            expected += one
        taken = tier.take(count, pinned.__contains__)
        check_tier(tier)
        if taken is None:
            assert len(expected) < count
            assert tier.num_blocks == len(kept)
        else:
            assert taken == expected
            assert tier._entries == copy._entries


def test_takes_that_fail_leave_no_heap_behind():
    tier = Tier(9, policy=LRU)
    filled(tier, "abcd", "xy")
    for _ in range(1000):
        assert tier.take(5, held("dy")) is None
    assert len(tier.order._queue) <= 3 * len(tier._entries) + 1
    assert tier.take(6, held("")) == hashes("dcbayx")
