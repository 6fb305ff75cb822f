"""In which order waiting sequences are tried, and that nobody is forgotten."""

import pytest

from foreword.core.block import BlockHash, Chain
from foreword.core.cache import KVCache
from foreword.core.lease import Store
from foreword.core.scheduler import Scheduler
from foreword.core.sequence import Sequence
from foreword.core.tier import Tier
from foreword.core.waiting import ARRIVAL, DEPTH_FIRST, LONGEST_PREFIX, MAX_PASSED, ORDERS, WINDOW

ROOT = BlockHash(b"root" * 8)


def scheduler(order, *tiers, num_blocks=64, seqs=1, budget=1000):
    return Scheduler(KVCache(num_blocks, 2, tiers=tiers), seqs, budget, budget, order)


def add(scheduled, *token_ids):
    sequence = Sequence(Chain(ROOT, 2, token_ids))
    probes = scheduled.add([sequence])
    assert not probes
    return sequence


def step(scheduled):
    """One step; returns whose prompts it came to the end of, which are done then."""
    work = scheduled.schedule()
    for sequence, copy in work.copies:
        scheduled.cache.filled(sequence.lease, copy.num_tokens)
    done = [one for one, _start, num in work.work if scheduled.settle(one, num)]
    for effect in scheduled.cache.lower.take_effects():
        if isinstance(effect, Store):
            stop = effect.start + len(effect.block_ids)
            hashes = effect.chain.hashes[effect.start : stop]
            scheduled.cache.lower.stored(effect.tier, hashes, ok=True)
    scheduled.finish(done)
    return done


def served(scheduled):
    found = []
    while scheduled.waiting or scheduled.running:
        found += step(scheduled)
    return [tuple(one.chain.token_ids) for one in found]


PROMPTS = [(5, 5, 5, 5, 1), (1, 1, 1), (5, 5, 5, 5, 7, 7, 1), (9, 9, 1), (1, 1, 2, 2, 1), (5, 5, 2)]


def test_first_come_first_served():
    scheduled = scheduler(ARRIVAL)
    for prompt in PROMPTS:
        add(scheduled, *prompt)
    assert served(scheduled) == PROMPTS


def test_depth_first_is_the_order_of_the_tree():
    scheduled = scheduler(DEPTH_FIRST)
    for prompt in PROMPTS:
        add(scheduled, *prompt)
    assert served(scheduled) == sorted(PROMPTS)


def test_longest_prefix_first_and_of_equals_the_oldest():
    scheduled = scheduler(LONGEST_PREFIX)
    for prompt in PROMPTS:
        add(scheduled, *prompt)
    first, *others = PROMPTS
    expected = [first, (5, 5, 5, 5, 7, 7, 1), (5, 5, 2), (1, 1, 1), (1, 1, 2, 2, 1), (9, 9, 1)]
    assert served(scheduled) == expected
    assert sorted(expected) == sorted([first, *others])


def test_a_sweep_goes_on_from_where_it_is():
    scheduled = scheduler(DEPTH_FIRST)
    for first in (2, 4, 6):
        add(scheduled, first, first, 1)
    step(scheduled)
    step(scheduled)
    for first in (1, 5):
        add(scheduled, first, first, 1)
    assert [prompt[0] for prompt in served(scheduled)] == [5, 6, 1]


def test_those_of_one_prompt_stay_together_while_it_grows():
    """What runs samples tokens, which must not move the sweep past others with its prompt."""
    scheduled = scheduler(DEPTH_FIRST, seqs=2)
    leader, follower = add(scheduled, 1, 1, 1), add(scheduled, 1, 1, 1)
    add(scheduled, 8, 8, 1)
    scheduled.schedule()
    assert [one.chain.token_ids[0] for one in scheduled.running] == [1, 8]
    scheduled.finish([scheduled.running[1]])
    scheduled.settle(leader, 3)
    leader.chain.extend([9])
    add(scheduled, 1, 1, 8)
    scheduled.schedule()
    assert scheduled.running[-1] is follower


@pytest.mark.parametrize("order", ORDERS)
def test_what_was_passed_over_is_asked_again_when_its_leader_came_further(order, monkeypatch):
    scheduled = scheduler(order, seqs=4, budget=4)
    leader, *followers = [add(scheduled, *range(10), last) for last in (20, 21, 22)]
    other = add(scheduled, 40)
    tried = []
    admit = scheduled.cache.admit

    def counted(chain, **asked):
        tried.append(chain.token_ids[-1])
        return admit(chain, **asked)

    monkeypatch.setattr(scheduled.cache, "admit", counted)
    step(scheduled)
    assert tried == [20], "the leader takes the whole budget"
    scheduled.finish([leader])  # and leaves: the next one leads
    leader = followers[0]
    tried.clear()
    work = scheduled.schedule()
    assert tried == [21]
    scheduled._max_prefill_tokens = 100
    work = scheduled.schedule()  # the same leader, before its chunk is computed
    assert tried == [21, 22, 40], "passed over, and blocks nobody"
    assert other in scheduled.running
    scheduled.schedule()
    assert tried == [21, 22, 40], "not asked while the leader is where it was"
    scheduled.settle(leader, work.work[0][2])
    scheduled.schedule()
    assert tried == [21, 22, 40, 22]


@pytest.mark.parametrize("order", ORDERS)
def test_what_left_is_not_tried(order):
    scheduled = scheduler(order)
    gone = [add(scheduled, *prompt) for prompt in PROMPTS]
    scheduled.finish(gone[1:4])
    scheduled.finish(gone[1:4])  # nothing of it is there
    assert len(scheduled.waiting) == 3
    assert sorted(served(scheduled)) == sorted([PROMPTS[0], *PROMPTS[4:]])


def test_nobody_waits_for_ever():
    """Each step brings another request whose prompt is known."""
    scheduled = scheduler(LONGEST_PREFIX)
    add(scheduled, 1, 1, 1, 1, 1)
    step(scheduled)
    unknown = add(scheduled, 3, 3, 3)
    for number in range(MAX_PASSED + 1):
        add(scheduled, 1, 1, 1, 1, 10 + number)
        if unknown in step(scheduled):
            break
    else:
        pytest.fail("it still waits")
    assert number >= MAX_PASSED - WINDOW - 1, "the order counts until then"


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_looks_at_few_of_many(order, monkeypatch):
    scheduled = scheduler(order, num_blocks=64, budget=8)
    for number in range(3000):
        add(scheduled, *[number % 7] * 6, 100 + number)
    looked = []
    known = scheduled.cache.num_known

    def counted(chain):
        looked.append(chain)
        return known(chain)

    monkeypatch.setattr(scheduled.cache, "num_known", counted)
    for _ in range(20):
        looked.clear()
        step(scheduled)
        assert len(looked) <= (2 * WINDOW if order == LONGEST_PREFIX else 0)
        assert len(scheduled.waiting.next_up()) <= WINDOW, "no more can be admitted in a step"


def test_what_is_preempted_returns_through_the_tiers():
    scheduled = scheduler(LONGEST_PREFIX, Tier(64), num_blocks=8, seqs=2)
    old, young = add(scheduled, 1, 1, 1), add(scheduled, *range(20, 29))
    work = scheduled.schedule()
    for sequence, _start, num in work.work:
        assert scheduled.settle(sequence, num)
        sequence.chain.extend([1])
    for effect in scheduled.cache.lower.take_effects():
        hashes = effect.chain.hashes[effect.start :][: len(effect.block_ids)]
        scheduled.cache.lower.stored(effect.tier, hashes, ok=True)
    waiting = add(scheduled, 7, 7, 7)
    while scheduled.num_preemptions == 0:
        work = scheduled.schedule()
        for sequence, _start, num in work.work:
            assert scheduled.settle(sequence, num)
            sequence.chain.extend([1])
        effects = scheduled.cache.lower.take_effects()
        for effect in effects:
            hashes = effect.chain.hashes[effect.start :][: len(effect.block_ids)]
            scheduled.cache.lower.stored(effect.tier, hashes, ok=True)
    assert young.lease is None
    while old.lease is not None:  # it takes what was the other's on the device
        work = scheduled.schedule()
        assert [one for one, *_ in work.work] in ([], [old])
        if work.work:
            scheduled.settle(old, 1)
            old.chain.extend([1])
        if len(old.chain) == 16:
            scheduled.finish([old])
    work = scheduled.schedule()
    assert [load.lease for load in work.loads] == [young.lease], (
        "it comes before what waited longer"
    )
    load = work.loads[0]
    assert load.stop == (len(young.chain) - 1) // 2, "what it sampled is there too"
    scheduled.cache.loaded(load, load.start, load.stop)
    assert young.num_uncomputed <= 2
    assert waiting.lease is not None
