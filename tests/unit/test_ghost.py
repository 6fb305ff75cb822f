"""Ghosts: one pass tells what LRU of any size would find; a sample nearly so; and what was really
found comes first."""

import random
import time
from functools import cache
from hashlib import sha256
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.block import BlockHash, Chain
from foreword.core.cost import StepCost, TierCost
from foreword.core.ghost import DAY_S, Ghost, Room, Served
from foreword.sim.prompt import visit
from foreword.sim.replay import Rules, replay
from foreword.sim.trial import Setting
from traces import read_trace_file

ROOT = BlockHash(b"r" * 32)
NOBODY = ("", "")
EXACT = 1 << 20  # a sample of all


def asked(chain, found=(0,), owner=NOBODY):
    """A request that looks for all of its blocks and leaves them behind."""
    return Served(owner, chain, len(chain.hashes), len(chain.hashes), found)


class LeafFirst:
    """An LRU cache that keeps the tree whole, as brute force has it: of the leaves the one used
    longest ago leaves; a request uses its whole path at once."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.used = {}  # path: when
        self.clock = 0

    def serve(self, tokens):
        """How many blocks were found."""
        paths = [tokens[: end + 1] for end in range(len(tokens))]
        found = next((at for at, path in enumerate(paths) if path not in self.used), len(paths))
        self.clock += 1
        self.used |= dict.fromkeys(paths, self.clock)
        while len(self.used) > self.capacity:
            inner = {path[:-1] for path in self.used}
            leaves = [path for path in self.used if path not in inner]
            del self.used[min(leaves, key=lambda path: (self.used[path], -len(path)))]
        return found


PROMPTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=40
)


@given(PROMPTS)
def test_lru_of_every_size_is_leaf_first_lru(prompts):
    ghost = Ghost(1, 1, EXACT, EXACT)
    for prompt in prompts:
        ghost.add(asked(Chain(ROOT, 1, prompt)), 0.0)
    num_asked = sum(map(len, prompts))
    for size in range(1, 12):  # of which each has a bucket of its own
        cache = LeafFirst(size)
        found = sum(cache.serve(prompt) for prompt in prompts)
        assert ghost.lru(size)[0] == pytest.approx(found / num_asked), size


@given(PROMPTS, st.integers(1, 8))
def test_what_no_size_asked_about_would_keep_is_forgotten(prompts, most):
    bounded, endless = Ghost(1, 1, most, EXACT), Ghost(1, 1, EXACT, EXACT)
    for prompt in prompts:
        for ghost in (bounded, endless):
            ghost.add(asked(Chain(ROOT, 1, prompt)), 0.0)
    assert len(bounded._times) <= most
    for size in range(most + 1):
        assert bounded.lru(size)[0] == pytest.approx(endless.lru(size)[0])


@cache
def requests(name):
    """Of each request of a trace the hashes that it leaves behind, and how many it looks for."""
    with read_trace_file(name) as trace:
        seen = [visit(record, 512) for record in trace]
    return [(one.prompt.hashes[: one.num_kept], one.num_reusable) for one in seen]


def trace_ghost(name, max_sampled, salt=b""):
    """A Ghost that was told of a trace's requests. `salt` draws another sample."""
    ghost, renamed = Ghost(512, 1, 1 << 24, max_sampled), {}
    for hashes, num_asked in requests(name):
        chain = Chain(ROOT, 1)
        for key in hashes:
            if key not in renamed:
                renamed[key] = BlockHash(sha256(salt + key).digest()) if salt else key
            chain.hashes.append(renamed[key])
        ghost.add(Served(NOBODY, chain, num_asked, len(hashes), [0]), 0.0)
    return ghost


SIZES = (500, 1000, 2000, 5000, 10_000, 20_000, 30_000, 50_000)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("mooncake_fast25_conversation.jsonl.gz", 32),
        ("mooncake_fast25_synthetic.jsonl.gz", 8),
    ],
)
def test_a_sample_errs_by_two_points_at_most(name, scale):
    exact = trace_ghost(name, EXACT)
    errors = []
    for salt in (b"", b"a", b"b"):
        ghost = trace_ghost(name, 8192, salt)
        assert ghost.scale == scale
        assert len(ghost._times) <= 8192
        pairs = [(ghost.lru(size)[0], exact.lru(size)[0]) for size in SIZES]
        errors.append(sum(abs(one - other) for one, other in pairs) / len(SIZES))
    assert max(errors) < 0.02, errors


def test_tiers_see_as_far_as_the_largest():
    """What is published goes to every tier, so a small one below a large one adds nothing. And what
    a cache of the core finds is what the Ghost says of LRU."""
    name = "mooncake_fast25_synthetic.jsonl.gz"
    sizes = [(5000,), (5000, 5000), (2000, 5000)]
    with read_trace_file(name) as trace:
        findings = replay(trace, [Setting("lru", blocks) for blocks in sizes], Rules())
    hits = [row.outcome.total.num_hit_blocks for row in findings.rows]
    assert hits[0] == hits[1]
    ghost = trace_ghost(name, EXACT)
    for num_hits in hits:
        assert ghost.lru(5000)[0] == pytest.approx(num_hits / ghost.num_asked, abs=3e-3)


def serve(ghost, num, found):
    """`num` requests in turn for ten prompts of ten blocks; they find so much."""
    for number in range(num):
        tokens = [number % 10 * 100 + at for at in range(10)]
        ghost.add(asked(Chain(ROOT, 1, tokens), found), number * 1.0)


COST = StepCost(per_token_s=1e-3, per_pair_s=1e-6)


def test_with_the_sizes_that_are_there_the_figures_are_what_was_found():
    """Though LRU would find nothing in 60 blocks of a cycle of 100, and all in 100."""
    places = [Room("device", 60), Room("disk", 80, TierCost(0.0, 1e6))]
    ghost = Ghost(1, 2, 400, EXACT)
    serve(ghost, 200, (4, 1))
    outlook = ghost.outlook(places, [60, 80], 1000, COST)
    assert outlook.hit_rates == pytest.approx((0.4, 0.1))
    rates = [sum(ghost.outlook(places, [60, size], 1000, COST).hit_rates) for size in range(0, 400)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(0.4)
    assert rates[399] == pytest.approx(0.95, abs=2e-3)  # each prompt was new once
    assert ghost.outlook(places, [0, 0], 1000, COST).hit_rates == (0.0, 0.0)


def test_where_less_is_found_than_lru_would_more_room_promises_less_too():
    ghost = Ghost(1, 1, 400, EXACT)
    serve(ghost, 200, (4,))
    place = Room("device", 128)
    assert ghost.lru(128)[0] == pytest.approx(0.95, abs=2e-3)
    assert ghost.outlook([place], [128], 1, COST).hit_rates == pytest.approx((0.4,))
    assert ghost.outlook([place], [400], 1, COST).hit_rates == pytest.approx((0.4,))


def test_what_is_saved_is_computing_less_loading():
    places = [Room("device", 50), Room("disk", 128, TierCost(0.5, 1000.0))]
    ghost = Ghost(1, 2, 400, EXACT)
    serve(ghost, 101, (0, 10))  # in 100 seconds
    outlook = ghost.outlook(places, [50, 128], 100, COST)
    blocks_per_day = ghost.num_asked * DAY_S / ghost.window_s
    computed_s = 1e-3 + 1e-6 * (1 + 4.5)  # a token, and the pairs with 4.5 others and itself
    loaded_s = (0.5 + 10 * 100 / 1000.0) / 10  # ten blocks at once
    assert outlook.saved_s == pytest.approx(blocks_per_day * (computed_s - loaded_s))
    assert outlook.saved_s < 0  # such a disk is worth nothing
    assert ghost.outlook(places, [50, 128], 100, None).saved_s is None
    assert ghost.outlook(places, [50, 0], 100, COST).saved_s == 0.0


def test_what_is_long_ago_counts_less():
    ghost = Ghost(1, 1, 400, EXACT)
    chain = Chain(ROOT, 1, range(10))
    for number in range(11):
        ghost.add(asked(chain), number * 10.0)
    assert ghost.num_asked == pytest.approx(110, rel=2e-3)
    assert ghost.lru(10)[0] == pytest.approx(10 / 11, abs=1e-3)
    for number in range(1, 12):  # two days later, others, who find nothing
        ghost.add(asked(Chain(ROOT, 1, range(100 * number, 100 * number + 10))), 2 * DAY_S)
    kept = 110 * exp(-2)
    assert ghost.num_asked == pytest.approx(kept + 110, rel=2e-3)
    assert ghost.lru(10)[0] == pytest.approx(kept * 10 / 11 / (kept + 110), abs=0.06)
    assert ghost.window_s < DAY_S


def test_answers_are_used_and_not_looked_for():
    ghost = Ghost(1, 1, 400, EXACT)
    ghost.add(Served(NOBODY, Chain(ROOT, 1, range(10)), 4, 9, [0]), 0.0)
    assert ghost.num_asked == 4
    ghost.add(Served(NOBODY, Chain(ROOT, 1, range(10)), 9, 9, [0]), 0.0)
    assert ghost.lru(8)[0] == pytest.approx(8 / 13)


def test_who_holds_what_and_what_came_since():
    ghost = Ghost(1, 1, 400, EXACT)
    ghost.add(asked(Chain(ROOT, 1, range(10)), owner=("a", "")), 0.0)
    clock = ghost.clock
    ghost.add(asked(Chain(ROOT, 1, range(20, 25)), owner=("b", "")), 0.0)
    assert ghost.depth(clock) == 5
    assert ghost.owners(8) == {("b", ""): 5, ("a", ""): 3}
    ghost.clear()
    assert ghost.owners(8) == {}
    assert ghost.depth(0) == 0


def test_a_block_that_is_not_sampled_costs_a_small_part_of_its_hash():
    """The least CPU of some rounds, for the machine may be busy; beside it a bare SHA-256."""
    draw = random.Random(0)
    ghost = Ghost(16, 1, 1 << 24, 64)
    for _ in range(200):
        ghost.add(asked(Chain(ROOT, 16, draw.choices(range(1 << 16), k=16 * 500))), 0.0)
    assert ghost.scale >= 1024
    seconds, bare = [], []
    for _ in range(20):
        chain = Chain(ROOT, 16, draw.choices(range(1 << 16), k=16 * 5000))
        begin_s = time.process_time()
        ghost.add(asked(chain), 0.0)
        seconds.append((time.process_time() - begin_s) / 5000)
        key, parent = bytes(chain.key), bytes(ROOT)
        begin_s = time.process_time()
        for at in range(0, len(key), 64):
            parent = sha256(parent + key[at : at + 64]).digest()
        bare.append((time.process_time() - begin_s) / 5000)
    assert min(seconds) < 0.25 * min(bare), (min(seconds), min(bare))
