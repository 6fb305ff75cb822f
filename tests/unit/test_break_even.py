"""When loading pays: the reference models on the reference hardware, at the peak of the data
sheets. H100: 989 TFLOP/s in bfloat16, PCIe Gen5 at 64 GB/s, an SSD of 14 GB/s. A prefill takes two
operations for each parameter and token."""

from random import Random

import pytest

from foreword.core.cost import Costs, StepCost, TierCost, TierFit
from foreword.core.plan import Present, RestorePlan, plan_restore

FLOPS_PER_S = 989e12
SMALL = 8.03e9, 128 << 10  # Llama 3.1 8B: parameters, bytes of KV of a token
LARGE = 70.6e9, 320 << 10  # and 70B
NUM_BLOCKS = 250  # of a prompt of 4,001 tokens


def costs(model: tuple[float, int], *bytes_per_s: float) -> Costs:
    """With tiers that answer at once, at these rates, and have never been late."""
    num_params, kv_bytes = model
    step = StepCost(2 * num_params / FLOPS_PER_S)
    fits = [TierFit(TierCost(0.0, rate), 16 * kv_bytes) for rate in bytes_per_s]
    for fit in fits:
        fit.error = 0.0
    return Costs(16, 16 * kv_bytes, 2048, fits, step)


def plan(of: Costs, num_others: int = 0) -> RestorePlan:
    """Of a prompt that the first tier has all blocks of and the device nothing."""
    return plan_restore(of, 4001, 0, [(0, 0, NUM_BLOCKS)], Present(num_others=num_others))


def test_break_even_of_the_reference_models() -> None:
    assert costs(SMALL).break_even_bytes_per_s(0, 1000) == pytest.approx(8.1e9, rel=0.005)
    assert costs(LARGE).break_even_bytes_per_s(0, 1000) == pytest.approx(2.3e9, rel=0.005)
    attending = costs(SMALL)
    attending.step = StepCost(2 * SMALL[0] / FLOPS_PER_S, per_pair_s=1e-9)
    assert attending.break_even_bytes_per_s(4000, 5000) < attending.break_even_bytes_per_s(0, 1000)


@pytest.mark.parametrize(("rate", "load_s"), [(64e9, 0.0082), (14e9, 0.0374)])
def test_host_and_disk_of_an_h100_beat_computing(rate: float, load_s: float) -> None:
    """4,000 tokens of the 8B: 65 ms to compute. While others wait all is loaded; alone the device
    computes the front meanwhile, and both are done at once."""
    of = costs(SMALL, rate)
    assert of.compute_s(0, 4000) == pytest.approx(0.065, rel=0.005)
    assert plan(of, 1).load_s == pytest.approx(load_s, rel=0.005)
    assert plan(of, 1).loads == ((0, 0, NUM_BLOCKS),)
    alone = plan(of)
    ((_tier, meet, stop),) = alone.loads
    assert stop == NUM_BLOCKS
    share = rate / (rate + of.break_even_bytes_per_s(0, 1000))
    assert stop - meet == pytest.approx(share * NUM_BLOCKS, abs=1)
    assert alone.total_s < plan(of, 1).total_s < alone.recompute_s


@pytest.mark.parametrize(("model", "rate"), [(SMALL, 8.1e9), (LARGE, 2.3e9)])
def test_a_request_is_not_made_slower_for_others_sake(
    model: tuple[float, int], rate: float
) -> None:
    """For those who wait it is best that all is loaded. Above break-even that is done; below it the
    request would take longer than without the cache."""
    slower, quicker = costs(model, rate * 0.97), costs(model, rate * 1.03)
    assert plan(quicker, 100).loads == ((0, 0, NUM_BLOCKS),)
    assert plan(slower, 100).loads == ()
    assert plan(slower).gain_s > 0, "alone the device and the tier share it"


@pytest.mark.parametrize("seed", range(200))
def test_no_other_split_is_quicker(seed: int) -> None:
    """Beside it: every place where computing and loading could meet."""
    draw = Random(seed)
    of = costs(SMALL, 10 ** draw.uniform(7, 11))
    per_token_s = 10 ** draw.uniform(-6, -4)
    of.step = StepCost(per_token_s, draw.choice([0, 1e-9]), draw.choice([0, 1e-2]), 0, 0, 1e-5)
    of.chunk_tokens = draw.choice([64, 512, 2048])
    first, stop = draw.randrange(20), draw.choice([21, 30, 250])
    num_tokens, ahead_s = stop * 16 + draw.randrange(1, 300), draw.choice([0, 1e-2])
    found = plan_restore(of, num_tokens, first * 16, [(0, first, stop)], Present(ahead_s))
    rest_s = of.compute_s(stop * 16, num_tokens)
    splits_s = [
        rest_s
        + max(
            ahead_s + of.compute_s(first * 16, meet * 16),
            of.tiers[0].load_s((stop - meet) * of.block_bytes),
        )
        for meet in range(first, stop)
    ]
    assert found.total_s == pytest.approx(min(*splits_s, found.recompute_s))
