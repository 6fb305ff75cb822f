"""Restore plans: never worse than any other split, and what they promise."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.cost import Costs, StepCost, TierCost, TierFit
from foreword.core.plan import ALONE, Present, num_late, plan_restore

SIZE, BLOCK_BYTES = 16, 1000


def seconds(least, most):
    return st.floats(least, most, allow_nan=False)


@st.composite
def cases(draw):
    """Costs, tokens of a prompt, and runs of tiers, after `known` blocks of the device."""
    step = StepCost(
        draw(seconds(1e-6, 1e-3)),
        draw(seconds(0, 1e-6)),
        draw(seconds(0, 0.02)),
        per_early_token_s=draw(seconds(0, 1e-4)),
    )
    known = draw(st.integers(0, 3))
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    error = draw(st.sampled_from((0.0, 0.25)))
    fits = [
        TierFit(TierCost(draw(seconds(0, 0.05)), draw(seconds(1e4, 1e8))), BLOCK_BYTES)
        for _ in lengths
    ]
    for fit in fits:
        fit.error = error
        fit.queued_bytes = draw(st.sampled_from((0, 5000)))
    costs = Costs(SIZE, BLOCK_BYTES, draw(st.sampled_from((32, 64, 512))), fits, step)
    runs, at = [], known
    for tier, length in enumerate(lengths):
        runs.append((tier, at, at + length))
        at += length
    num_tokens = at * SIZE + draw(st.integers(1, 40))
    return costs, num_tokens, known, runs


def ready_s(costs, known, runs, meets, ahead_s):
    """When the first token comes if each run is loaded from its meeting point on, by what the words
    say: fronts one after another, loads all at once; runs without a load at the end are computed
    with the rest."""
    end = max(
        (run[2] for run, meet in zip(runs, meets, strict=True) if meet < run[2]), default=known
    )
    at_s = ahead_s
    for (tier, start, stop), meet in zip(runs, meets, strict=True):
        if stop <= end:
            front_s = costs.compute_s(start * SIZE, meet * SIZE)
            at_s = max(at_s + front_s, costs.tiers[tier].load_s((stop - meet) * BLOCK_BYTES))
    return at_s, end


@given(cases(), st.sampled_from((0.0, 0.01)))
@settings(max_examples=300, deadline=None)
def test_no_split_is_quicker(case, ahead_s):
    costs, num_tokens, known, runs = case
    plan = plan_restore(costs, num_tokens, known * SIZE, runs, Present(ahead_s))
    splits = product(*(range(start, stop + 1) for _tier, start, stop in runs))
    totals = []
    for meets in splits:
        at_s, end = ready_s(costs, known, runs, meets, ahead_s)
        totals.append(at_s + costs.compute_s(end * SIZE, num_tokens))
    assert min(totals) <= plan.total_s * (1 + 1e-9)
    assert plan.total_s <= plan.recompute_s * (1 + 1e-9)
    loads = dict((tier, first) for tier, first, _stop in plan.loads)
    own = [loads.get(tier, stop) for tier, _start, stop in runs]
    at_s, end = ready_s(costs, known, runs, own, ahead_s)
    assert at_s + costs.compute_s(end * SIZE, num_tokens) <= plan.total_s + 1e-9
    if costs.tiers[0].error == 0:  # no load is so late that the promise forbids it
        assert plan.total_s <= min(totals) * (1 + 1e-9)


@given(cases(), seconds(0, 0.3))
@settings(max_examples=300, deadline=None)
def test_the_usual_share_of_late_reads_does_not_break_the_promise(case, share):
    costs, num_tokens, known, runs = case
    for fit in costs.tiers:
        fit.late_share = share
    plan = plan_restore(costs, num_tokens, known * SIZE, runs, ALONE)
    if not plan.loads:
        assert (plan.gain_s, plan.late_s) == (0, 0)
        return
    lost = sum(num_late(stop - start, share) for _tier, start, stop in plan.loads)
    end = plan.loads[-1][2]
    rest_s = costs.compute_s((end - lost) * SIZE, num_tokens)
    assert plan.late_s + rest_s <= plan.promised_s * (1 + 1e-9)


@given(st.integers(1, 300), seconds(0, 0.9))
def test_how_many_reads_are_late_but_seldom(num_reads, share):
    found = num_late(num_reads, share)
    chances = [0.0] * (num_reads + 1)
    chances[0] = 1.0
    for _ in range(num_reads):  # one read after another
        for count in range(num_reads, 0, -1):
            chances[count] = chances[count] * (1 - share) + chances[count - 1] * share
        chances[0] *= 1 - share
    assert sum(chances[: found + 1]) >= 0.99 - 1e-9
    assert found == 0 or sum(chances[:found]) < 0.99 + 1e-9
