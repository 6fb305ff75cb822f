"""The planner's figures: those of the reference model, hardware and chat, at the peak of the data
sheets, and that each formula says what was computed."""

import itertools

import pytest

from foreword.core.cost import TierCost
from foreword.sim.catalogue import HARDWARE, MODELS, hardware_named
from foreword.sim.model import ShapeError
from foreword.sim.plan import (
    Deployment,
    PlanError,
    PlannedTier,
    Row,
    deployment,
    figures,
    load_table,
    tier_table,
)
from foreword.sim.workload import Chat
from formulas import by_formula


def site(model: str = "llama-3.1-8b", hardware: str = "h100") -> Deployment:
    return deployment(MODELS[model], hardware_named(hardware))


def values(place: Deployment) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures(place)}


def row(rows: "list[Row]", **wanted: object) -> Row:
    (found,) = [one for one in rows if wanted.items() <= one.items()]
    return found


def number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def test_kv_of_the_reference_model() -> None:
    place = site()
    found = values(place)
    assert found["KV of a token"] == 128 * 1024
    assert 4000 * place.kv_bytes == 500 * 2**20
    assert found["room for KV in a replica"] == pytest.approx(64e9, rel=0.005)
    assert 64e9 / place.kv_bytes == pytest.approx(488_000, rel=0.001)
    device = row(list(tier_table(place).rows), tier="device")
    assert device["tokens"] == pytest.approx(488_000, rel=0.001)
    assert device["conversations"] == pytest.approx(120, rel=0.01)
    assert site("llama-3.1-70b", "h100:2").kv_bytes == 320 * 1024
    assert 100 * 4000 * place.kv_bytes == pytest.approx(52e9, rel=0.01)


def test_seconds_of_a_token_and_break_even() -> None:
    place = site()
    found = values(place)
    assert found["prefill per token"] == pytest.approx(16.2e-6, rel=0.005)
    rows = list(tier_table(place).rows)
    assert row(rows, tier="host")["us_per_token"] == pytest.approx(2.0, abs=0.05)
    assert row(rows, tier="disk")["us_per_token"] == pytest.approx(9.4, abs=0.05)
    assert found["break-even bandwidth"] == pytest.approx(8.1e9, rel=0.005)
    big = site("llama-3.1-70b", "h100:2")
    per_token_s = 2 * values(big)["prefill per token"]  # of one device
    assert per_token_s == pytest.approx(143e-6, rel=0.005)
    assert big.kv_bytes / per_token_s == pytest.approx(2.3e9, rel=0.005)


def test_attention_grows_with_the_prompt() -> None:
    found = values(site())
    assert found["attention over the rest, 8,192 tokens"] == pytest.approx(0.13, abs=0.005)
    assert found["attention over the rest, 32,768 tokens"] == pytest.approx(0.54, abs=0.006)


def test_the_table_of_10000_tokens() -> None:
    place = site()
    rows = list(load_table(place).rows)
    host = row(rows, prompt_tokens=10_000, tier="host")
    assert host["bytes"] == pytest.approx(1.31e9, rel=0.001)
    assert host["load_s"] == pytest.approx(0.0205, rel=0.001)
    assert row(rows, prompt_tokens=10_000, tier="disk")["load_s"] == pytest.approx(
        0.0936, rel=0.001
    )
    linear_s = 10_000 * place.step.per_token_s
    assert linear_s == pytest.approx(0.162, rel=0.003)
    assert number(host["recompute_s"]) - linear_s == pytest.approx(0.0265, rel=0.001)
    assert {one["cheaper"] for one in rows} == {"load"}
    # an SSD that eight replicas are busy with reads slower than they compute
    shared = PlannedTier("disk", 30e12, TierCost(1e-4, 14e9, 8))
    slow = deployment(MODELS["llama-3.1-8b"], HARDWARE["h100"], tiers=[shared])
    slow_rows = list(load_table(slow).rows)
    assert row(slow_rows, prompt_tokens=10_000)["cheaper"] == "recompute"
    assert row(slow_rows, prompt_tokens=10_000)["load_s"] == pytest.approx(8 * 0.0936, rel=0.002)


def test_the_reference_chat() -> None:
    chat, step = Chat(), site().step
    assert chat.num_prompt_tokens() == 158_000
    assert chat.num_new_tokens(replies_kept=False) == 11_700
    assert chat.num_new_tokens(replies_kept=True) == 6_000
    last = chat.prompt_tokens(20)
    assert last == 11_700
    assert step.prefill_s(last) == pytest.approx(0.226, abs=0.0005)
    assert step.prefill_s(400, last - 400) == pytest.approx(0.009, abs=0.0005)
    assert chat.num_billed_tokens(1.25, 0.1) == pytest.approx(29_255)
    assert 1 - chat.num_billed_tokens(1.25, 0.1) / 158_000 == pytest.approx(0.81, abs=0.005)
    assert 1 - chat.num_billed_tokens(1.25, 0.05) / 158_000 == pytest.approx(0.86, abs=0.005)


def test_one_dgx_h100_in_tokens() -> None:
    """Each tier holds 4 to 15 times the tokens of the one above."""
    rows = {str(one["tier"]): one for one in tier_table(site(hardware="dgx-h100")).rows}
    tokens = [number(rows[name]["tokens"]) for name in ("device of 8 replicas", "host", "disk")]
    assert tokens == pytest.approx([3.90e6, 15.26e6, 228.9e6], rel=0.001)
    assert [b / a for a, b in itertools.pairwise(tokens)] == pytest.approx([3.9, 15], rel=0.01)
    assert rows["network"]["tokens"] is None
    assert rows["network"]["us_per_token"] == pytest.approx(2.62, rel=0.001)


def test_replicas_take_the_fewest_devices() -> None:
    assert site("llama-3.1-70b", "h100:8").num_replicas == 4
    assert site("llama-3.1-8b", "h100:8").num_replicas == 8
    with pytest.raises(PlanError, match=r"take 141 GB, and 1 × h100 have 80.*--hardware h100:N"):
        site("llama-3.1-70b")
    with pytest.raises(PlanError, match="in 4 for a replica"):
        deployment(MODELS["llama-3.1-8b"], HARDWARE["h100"], devices_per_replica=4)
    small = deployment(MODELS["llama-3.1-70b"], HARDWARE["h100"], weights_dtype="int4")
    assert small.weights_bytes == pytest.approx(35.3e9, rel=0.001)


def test_what_lies_on_all_devices_takes_room_on_all() -> None:
    """MLA's latent belongs to all heads; of eight KV heads sixteen devices hold each twice."""
    mla = site("deepseek-v3", "h200:8")
    assert mla.kv_bytes == 70_272
    assert (mla.devices_per_replica, mla.copies) == (8, 8)
    assert mla.device_tokens == pytest.approx(mla.kv_room_bytes / 8 / 70_272)
    # eight copies over eight links, from eight disks that are read once
    assert [tier.cost.bytes_per_s for tier in mla.tiers] == [64e9, 64e9, 50e9]
    wide = deployment(MODELS["llama-3.1-8b"], hardware_named("h100:16"), devices_per_replica=16)
    assert wide.copies == 2


def test_a_type_of_half_the_bytes_doubles_the_tokens() -> None:
    halved = deployment(MODELS["llama-3.1-8b"], HARDWARE["h100"], kv_dtype="fp8", mfu=0.5)
    assert halved.kv_bytes == 64 * 1024
    assert halved.device_tokens == pytest.approx(2 * site().device_tokens)
    assert halved.step.per_token_s == pytest.approx(2 * site().step.per_token_s)


def test_hardware_by_name() -> None:
    assert hardware_named("H100:4").num_devices == 4
    with pytest.raises(KeyError):
        hardware_named("h99")
    for bad in ("h100:0", "h100:x", "h100:"):
        with pytest.raises(ValueError, match=r"devices|invalid literal"):
            hardware_named(bad)


@pytest.mark.parametrize("model", MODELS)
def test_each_formula_gives_its_figure(model: str) -> None:
    for figure in figures(site(model, "h100:64")):
        assert by_formula(figure) == pytest.approx(figure.value), figure.name


def test_an_unknown_type_of_weights_is_refused() -> None:
    with pytest.raises(ShapeError, match="are not known"):
        deployment(MODELS["llama-3.1-8b"], HARDWARE["h100"], weights_dtype="int3")
