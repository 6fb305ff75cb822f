"""The sampler by example, and against the distribution that it claims."""

from collections import Counter

import pytest
import torch

from foreword.core.request import SamplingParams
from foreword.engine.sampler import adjusted, sample, token_logprob, uniform


def params(**changes):
    return SamplingParams(1, **changes)


def shares(logits, chosen, num_draws=4000):
    drawn = Counter(
        sample(torch.tensor(logits), chosen, uniform(1, 0, at)) for at in range(num_draws)
    )
    return [drawn[i] / num_draws for i in range(len(logits))]


def test_a_draw_depends_on_seed_sample_and_position_alone():
    draws = {uniform(s, i, p) for s in (0, -1, 1 << 64) for i in range(3) for p in range(50)}
    assert len(draws) == 3 * 3 * 50
    assert all(0 <= draw < 1 for draw in draws)
    assert uniform(5, 1, 9) == uniform(5, 1, 9)
    assert abs(sum(uniform(0, 0, p) for p in range(2000)) / 2000 - 0.5) < 0.02


def test_temperature_zero_is_greedy():
    assert sample(torch.tensor([0.0, 3.0, 2.9]), params(temperature=0), 0.99) == 1


def changed(logits, prompt=(), sampled=(), banned=(), **changes):
    given = torch.tensor(logits)
    result = adjusted(given, params(**changes), prompt, sampled, banned)
    assert given.tolist() == pytest.approx(logits)
    return result.tolist()


def test_a_bias_can_forbid_and_force():
    assert changed([0.0, 3.0, 2.9], logit_bias={1: -1e9}) == pytest.approx([0, -1e9, 2.9])
    assert changed([0.0, 3.0, 2.9], logit_bias={0: 100}) == pytest.approx([100, 3, 2.9])


def test_penalties_count_what_was_sampled():
    logits = [1.0, 2.0, 3.0, 4.0]
    seen = {"prompt": (3,), "sampled": (1, 2, 1)}
    assert changed(logits, **seen, presence_penalty=0.5) == pytest.approx([1, 1.5, 2.5, 4])
    assert changed(logits, **seen, frequency_penalty=0.5) == pytest.approx([1, 1, 2.5, 4])
    assert changed(logits, **seen, frequency_penalty=-2) == pytest.approx([1, 6, 5, 4])
    assert changed(logits, prompt=(3,), presence_penalty=2) == logits


def test_the_repetition_penalty_counts_the_prompt_too():
    logits = [1.0, -2.0, 4.0, 3.0]
    got = changed(logits, prompt=(1,), sampled=(2, 2), repetition_penalty=2)
    assert got == pytest.approx([1, -4, 2, 3])


def test_no_bias_brings_back_what_is_banned():
    assert changed([0.0, 1.0], banned=(1,), logit_bias={1: 100}) == [0, float("-inf")]


def test_nothing_asked_for_copies_nothing():
    logits = torch.tensor([0.0, 1.0])
    assert adjusted(logits, params(), (0,), (1,), ()) is logits


def test_min_p_is_relative_to_the_most_likely():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert shares(logits, params(min_p=0.59)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(logits, params(min_p=1)) == [1, 0, 0, 0]
    # What is left is all that top-p sees: 0.5 of 0.8.
    assert shares(logits, params(min_p=0.4, top_p=0.6)) == [1, 0, 0, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_follow_the_softmax(temperature):
    logits = [0.0, 1.0, 2.0, -1.0]
    expected = (torch.tensor(logits) / temperature).softmax(-1).tolist()
    got = shares(logits, params(temperature=temperature))
    assert got == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_the_k_most_likely():
    got = shares([0.0, 1.0, 2.0, -1.0], params(top_k=2))
    assert got == pytest.approx([0, 0.269, 0.731, 0], abs=0.03)
    assert shares([0.0, 1.0, 2.0, -1.0], params(top_k=1)) == [0, 0, 1, 0]
    assert shares([0.0, 0.0], params(top_k=99)) == pytest.approx([0.5, 0.5], abs=0.03)


def test_top_p_keeps_the_smallest_sufficient_set():
    logits = torch.tensor([0.6, 0.3, 0.1]).log().tolist()
    assert shares(logits, params(top_p=0.5)) == [1, 0, 0]
    assert shares(logits, params(top_p=0.7)) == pytest.approx([2 / 3, 1 / 3, 0], abs=0.03)
    assert shares(logits, params(top_p=0.0001)) == [1, 0, 0]


def test_top_p_looks_beyond_the_first_256():
    flat = [0.0] * 1000
    kept = [share > 0 for share in shares(flat, params(top_p=0.5), 5000)]
    assert 480 <= sum(kept) <= 501


def test_very_low_temperatures_do_not_overflow():
    assert sample(torch.tensor([-1e4, 0.0, 1e4]), params(temperature=1e-30), 0.999) == 2


def test_logprobs_are_the_models_own():
    logits = torch.tensor([0.0, 1.0, 2.0])
    reported = token_logprob(logits, 0, 2)
    assert reported.logprob == pytest.approx(-2.4076, abs=1e-3)
    assert [token_id for token_id, _ in reported.top] == [2, 1]
    assert token_logprob(logits, 0, 0).top == ()
