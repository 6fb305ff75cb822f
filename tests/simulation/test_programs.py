"""Programs, what can be reused of them at most, and how near each order comes to that."""

import json
from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.cli import main as cli
from foreword.cli.bench_schedule import COST, compared
from foreword.core.cache import KVCache
from foreword.core.policy import LRU
from foreword.core.waiting import ARRIVAL, DEPTH_FIRST, LONGEST_PREFIX, MAX_PASSED
from foreword.sim.programs import KINDS, arriving, batch, most_hit_blocks
from foreword.sim.prompt import visit
from foreword.sim.shape import WorkerShape
from foreword.sim.trace import Record, Trace
from foreword.sim.workload import Segments

prompts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=6), st.lists(st.integers(0, 1), max_size=3)
    ),
    min_size=1,
    max_size=5,
)


def programs_of(kind, num, seed=1):
    return list(KINDS[kind](Random(seed), Segments(), num))


def hit_blocks(records):
    """Of one request after another, with room for all."""
    cache, num_hits = KVCache(99, 2), 0
    for record in records:
        seen = visit(record, 2)
        lease, effects = cache.admit(seen.prompt.copy())
        num_hits += (lease.num_reused_tokens - sum(one.num_tokens for one in effects)) // 2
        for copy in effects:
            cache.filled(lease, copy.num_tokens)
        tail = seen.whole.token_ids[len(seen.prompt) :]
        lease.chain.extend(tail)
        assert cache.extend(lease, len(lease.chain))
        cache.filled(lease, len(lease.chain) - lease.num_computed_tokens)
        cache.release(lease)
    return num_hits


@given(prompts)
def test_the_optimum_is_that_of_the_best_order(drawn):
    with Trace(1) as trace:
        for prompt, answer in drawn:
            trace.add(Record(len(prompt), prompt, 1, 0.0, len(answer), answer))
        most, total = most_hit_blocks(trace, 2)
        assert total == sum((record.num_tokens - 1) // 2 for record in trace)
        best = max(hit_blocks(order) for order in permutations(trace))
    assert best <= most
    if not any(answer for _prompt, answer in drawn):
        assert best == most, "of answers each may need the other's"


@pytest.mark.parametrize("kind", KINDS)
def test_programs_are_the_same_for_one_seed(kind):
    assert programs_of(kind, 2) == programs_of(kind, 2)
    assert programs_of(kind, 2) != programs_of(kind, 2, seed=2)


@pytest.mark.parametrize("kind", ["tree-of-thought", "agents"])
def test_what_needs_an_answer_has_it_in_its_prompt(kind):
    programs = programs_of(kind, 2)
    trace, follows = arriving(programs, 1.0, Random(1))
    with trace:
        assert len(follows) == sum(call.after is not None for one in programs for call in one)
        for place, (answered, pause_s) in follows.items():
            before, record = trace[answered], trace[place]
            known = [*before.ids, *before.output_ids]
            assert list(record.ids[: len(known)]) == known
            assert pause_s >= 0


@pytest.mark.parametrize(
    ("kind", "num", "num_blocks"),
    [("few-shot", 12, 400), ("tree-of-thought", 8, 700), ("agents", 12, 2400)],
)
def test_depth_first_reaches_the_optimum_of_a_batch(kind, num, num_blocks):
    """To the block, on a device that does not hold the tree."""
    with batch(programs_of(kind, num), Random(1)) as trace:
        blocks = {one for record in trace for one in visit(record, 16).whole.hashes}
        assert len(blocks) > 1.5 * num_blocks
        shape = WorkerShape(num_blocks, COST, max_num_seqs=16, policy=LRU)
        found = compared(trace, shape, {})
    assert found[DEPTH_FIRST]["of_optimum"] == 1
    assert found[ARRIVAL]["of_optimum"] < 0.9
    assert found[ARRIVAL]["seconds"] > found[DEPTH_FIRST]["seconds"]


def test_the_bench_says_what_each_order_gives(capsys):
    words = ["--kind", "few-shot", "--programs", "12", "--blocks", "400"]
    assert cli.main(["bench", "schedule", *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    kind = result["kinds"]["few-shot"]
    assert kind["blocks_of_prompts"] > 2 * kind["blocks_of_device"]
    assert result["batch_of_optimum"] == kind["batch"][DEPTH_FIRST]["of_optimum"] == 1
    assert kind["batch"][ARRIVAL]["of_optimum"] < 0.5
    assert result["programs_of_optimum"] >= 0.96
    late = kind["requests_at_0.9"]
    assert late[LONGEST_PREFIX]["of_optimum"] > 2 * late[ARRIVAL]["of_optimum"]
    assert 0 < result["most_passed"] <= result["most_passed_bound"] == MAX_PASSED
