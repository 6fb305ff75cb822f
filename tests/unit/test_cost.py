"""What steps and loads cost, and what can be learnt of it from steps."""

from itertools import product
from random import Random

import pytest

from foreword.core.cost import (
    EARLY_TOKENS,
    Costs,
    StepCost,
    StepFit,
    StepWork,
    TierCost,
    TierFit,
    num_pairs,
)

COST = StepCost(2e-4, 3e-8, 5e-3, 1e-3, 4e-8, 7e-4)


def work(num_tokens: int, context: int, num_decoding: int) -> StepWork:
    made = StepWork()
    made.add(num_tokens, context)
    for _ in range(num_decoding):
        made.add(1, 3 * context, is_decoding=True)
    return made


STEPS = [work(*of) for of in product((0, 1, 64, 500), (0, 10, 900), (0, 1, 7)) if of[0] or of[2]]


def test_each_token_attends_to_all_before_it_and_itself() -> None:
    assert num_pairs(3, 10) == 11 + 12 + 13
    assert num_pairs(0, 10) == 0


def test_a_prefill_in_chunks_costs_what_it_costs_at_once_but_for_the_steps() -> None:
    chunks_s = COST.prefill_s(60) + COST.prefill_s(40, 60)
    assert chunks_s == pytest.approx(COST.prefill_s(100) + COST.per_step_s)
    chunks_s = COST.prefill_s(200) + COST.prefill_s(300, 200)
    early_s = EARLY_TOKENS * COST.per_early_token_s
    assert chunks_s == pytest.approx(COST.prefill_s(500) + COST.per_step_s + early_s)
    assert COST.prefill_s(0, 60) == 0


def test_a_step_of_many_costs_less_than_many_steps() -> None:
    both = work(64, 0, 2)
    assert COST.step_s(both) == pytest.approx(
        COST.prefill_s(64) + 2 * COST.per_decode_s + 2 * COST.per_decode_pair_s
    )


def test_costs_are_found_again() -> None:
    fit = StepFit()
    for step in STEPS:
        fit.add(step, COST.step_s(step))
    found = fit.solve()
    assert found is not None
    assert fit.num_steps == len(STEPS)
    for step in STEPS:
        assert found.step_s(step) == pytest.approx(COST.step_s(step), rel=1e-6)


def test_what_costs_nothing_is_0_and_never_less() -> None:
    """Steps that take the less the more tokens they have: no cost can say so."""
    fit = StepFit()
    for num_tokens in (1, 10, 100):
        fit.add(work(num_tokens, 0, 0), 1 / num_tokens)
    found = fit.solve()
    assert found is not None
    assert min(getattr(found, name) for name in StepCost.__dataclass_fields__) == 0
    assert found.per_token_s == 0
    assert found.per_step_s == pytest.approx(0.37)


def test_what_was_never_run_is_not_known() -> None:
    fit = StepFit()
    assert fit.solve() is None
    fit.add(work(0, 50, 1), 0.5)
    found = fit.solve()
    assert found is not None
    assert found.per_token_s == found.per_early_token_s == 0
    assert found.step_s(work(0, 50, 1)) == pytest.approx(0.5)


def test_where_prefills_were_short_alone_their_tokens_cost_the_same() -> None:
    fit = StepFit()
    for num_tokens in (1, 10, 100):
        fit.add(work(num_tokens, 0, 0), 0.1 + 0.01 * num_tokens)
    found = fit.solve()
    assert found is not None
    assert found.per_token_s == pytest.approx(0.01)
    assert found.per_early_token_s == 0


def test_a_copy_stays_as_it_was() -> None:
    fit = StepFit()
    fit.add(work(10, 0, 0), 1.0)
    copy = fit.copy()
    fit.add(work(20, 0, 0), 9.0)
    assert copy.num_steps == 1
    found = copy.solve()
    assert found is not None
    assert found.step_s(work(10, 0, 0)) == pytest.approx(1.0)


def test_readers_of_a_tier_share_its_bandwidth() -> None:
    assert TierCost(0.01, 1e6, shared_by=4).load_s(500_000) == pytest.approx(0.01 + 2.0)
    assert TierCost(0.01, 1e6).load_s(0) == 0


def test_what_is_older_counts_less() -> None:
    fit = StepFit(older=1 / 16)
    for _ in range(3):
        for step in STEPS:
            fit.add(step, 10 * COST.step_s(step))
    for _ in range(20):
        for step in STEPS:
            fit.add(step, COST.step_s(step))
    solved = fit.solve()
    assert solved is not None
    for step in STEPS:
        assert solved.step_s(step) == pytest.approx(COST.step_s(step), rel=1e-6)


READ = 1 << 21


def reads(fit: TierFit, cost: TierCost, num_reads: int, late: float = 0.0) -> None:
    """Of one to four at once, within 15 % of what the cost says; some come after a second."""
    draw = Random(str((cost, num_reads)))
    for _ in range(num_reads):
        num_bytes = READ * draw.randint(1, 4)
        seconds = cost.load_s(num_bytes) * draw.uniform(0.85, 1.15)
        fit.add(num_bytes, 1.0 if draw.random() < late else seconds)


def near(fit: TierFit, cost: TierCost) -> bool:
    sizes = [READ * many for many in (1, 4, 32)]
    return all(fit.load_s(size) == pytest.approx(cost.load_s(size), rel=0.15) for size in sizes)


def test_a_tier_is_learnt_from_its_reads_whatever_was_expected() -> None:
    truth = TierCost(5e-4, 5e9)
    for start in (TierCost(1e-3, 1e9), TierCost(1e-5, 5e10), TierCost(0.2, 5e7)):
        fit = TierFit(start, READ)
        assert near(fit, start)
        reads(fit, truth, 300)
        assert near(fit, truth)
        assert 0.02 < fit.error < 0.2
        assert fit.late_share < 0.01


def test_a_few_late_reads_are_counted_and_change_nothing_else() -> None:
    truth = TierCost(5e-4, 5e9)
    fit = TierFit(truth, READ)
    reads(fit, truth, 2000, late=0.05)
    assert near(fit, truth)
    assert 0.03 < fit.late_share < 0.08


def test_a_tier_that_changes_is_known_after_four_reads_and_back_after_four() -> None:
    quick, slow = TierCost(5e-4, 5e9), TierCost(5e-2, 5e7)
    fit = TierFit(quick, READ)
    reads(fit, quick, 100)
    reads(fit, slow, 4)
    assert fit.load_s(READ) == pytest.approx(slow.load_s(READ), rel=0.3)
    reads(fit, slow, 100)
    reads(fit, quick, 4)
    assert fit.load_s(READ) == pytest.approx(quick.load_s(READ), rel=0.3)


def test_what_is_queued_comes_first() -> None:
    fit = TierFit(TierCost(1e-3, 1e9), READ)
    alone_s = fit.load_s(READ)
    fit.queued_bytes = 5 * READ
    assert fit.load_s(READ) == pytest.approx(alone_s + 5 * READ / 1e9)
    assert fit.load_s(0) == fit.late_s(0) == 0


def test_a_prefill_is_computed_chunk_by_chunk() -> None:
    costs = Costs(16, 1000, 200, (), COST)
    expected_s = COST.prefill_s(200, 50) + COST.prefill_s(200, 250) + COST.prefill_s(30, 450)
    assert costs.compute_s(50, 480) == pytest.approx(expected_s)
    assert costs.compute_s(480, 480) == 0
