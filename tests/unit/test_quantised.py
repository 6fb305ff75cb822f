"""Quantised weights: near the float32 model, the same bits whatever the number of rows, known apart
from all others by their Identity, and refused where there are no kernels for them."""

import argparse
import logging
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from foreword.cli import main as cli
from foreword.cli.bench_quality import add_arguments, compared, run
from foreword.cli.bench_transformers import Ours
from foreword.cli.failure import EXIT_CODES
from foreword.engine.engine import TorchEngine
from foreword.engine.exact import linear_shapes
from foreword.engine.linear import PackedLinear
from foreword.engine.model import load_model
from foreword.engine.quantised import (
    GROUP,
    Int4Linear,
    Int8Linear,
    QuantisedLinear,
    quantise_layers,
)
from foreword.engine.runner import Part, Runner
from foreword.engine.settings import KINDS, EngineSettings
from tiny import make_tiny

IDS = list(range(3, 63))
FORMS = [Int4Linear, Int8Linear]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("llama"))


def linear(num_outputs: int, num_inputs: int, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(num_inputs, num_outputs, bias=bias).to(torch.bfloat16)
    return layer.requires_grad_(False)


def weight_of(layer: QuantisedLinear) -> torch.Tensor:
    """What its codes stand for, rounded to bfloat16: the layer's answer to unit rows."""
    bias, layer.bias = layer.bias, None
    weight = layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).T
    layer.bias = bias
    return weight


@pytest.mark.parametrize("form", FORMS)
def test_no_weight_is_further_off_than_half_a_step(form: type[QuantisedLinear]) -> None:
    plain = linear(2064, 96)  # more rows than are rounded at a time
    plain.weight[7] *= 100
    weight = plain.weight.float()
    if form is Int4Linear:
        groups = weight.view(len(weight), -1, GROUP)
        steps = ((groups.amax(2) - groups.amin(2)) / 15).repeat_interleave(GROUP, 1)
    else:
        steps = (weight.abs().amax(1, keepdim=True) / 127).expand_as(weight)
    error = (weight_of(form(plain)).float() - weight).abs()
    # Half a step, and what bfloat16 takes off: scale and middle (8 bits) and this product.
    assert float((error - weight.abs() / 128 - steps * 8 / 256).div(steps).max()) <= 0.5


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_lie_on_the_grid_are_kept(form: type[QuantisedLinear]) -> None:
    plain = linear(32, 64)
    codes = torch.randint(0, 16, (32, 64), dtype=torch.float32)
    codes[:, ::GROUP], codes[:, 1::GROUP] = 0, 15
    plain.weight.data = ((codes - 8) / 4).to(torch.bfloat16)
    if form is Int8Linear:
        plain.weight.data[:, 0] = 127 / 4
    plain.weight.data[5], plain.weight.data[6, :GROUP] = 0, 0.375  # groups without a range
    if form is Int8Linear:
        plain.weight.data[6] = 0.25
    assert torch.equal(weight_of(form(plain)), plain.weight)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_among_others(form: type[QuantisedLinear], bias: bool) -> None:
    plain = linear(160, 96, bias)
    layer = form(plain)
    rows = torch.randn(2, 150, 96, dtype=torch.bfloat16)
    whole = layer(rows)
    assert whole.shape == (2, 150, 160)
    scale = float(plain(rows).float().std())
    assert (
        float((whole - plain(rows)).float().std()) < (0.1 if form is Int4Linear else 0.01) * scale
    )
    for num in (1, 2, 3, 5, 33, 149):
        assert torch.equal(layer(rows[1, :num]), whole[1, :num])
    assert layer(rows[:, :0]).shape == (2, 0, 160)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "olmo2", "gemma3"])
def test_logits_are_those_of_float32_with_the_rounded_weights(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Which are near those of the weights themselves."""
    folder = make_tiny(tmp_path, name)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    exact.lm_head.weight = nn.Parameter(exact.lm_head.weight.detach().clone())  # no embedding
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        unrounded = exact(ids).logits[0]
        own = float((plain(ids).logits[0] - unrounded).std())
    for path, layer in plain.named_modules():
        if isinstance(layer, nn.Linear):
            form = Int8Linear if kind == "int8" or path == "lm_head" else Int4Linear
            exact.get_submodule(path).weight.data = weight_of(form(layer)).float()
    with torch.inference_mode():
        expected = exact(ids).logits[0]
    model = load_model(str(folder), quantise=kind)
    assert all(type(layer) is not nn.Linear for layer in model.module.modules())
    parts = [Part([0, 1, 2, 3], at, [token], True) for at, token in enumerate(IDS)]
    got = Runner(model, 4, 16, exact=False).step(parts)
    assert float((got - expected).std()) < 1.5 * own, "rounding as bfloat16 rounds"
    error = float((expected - unrounded).std() / unrounded.std())
    assert error < (0.6 if kind == "int4" else 0.06), (error, "what tiny random models make of it")


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_is_quantised_and_known_to_exact_mode(kind: str, folder: Path) -> None:
    model = load_model(str(folder), quantise=kind)
    assert model.quantised is not None
    assert (model.quantised.num_layers, model.quantised.num_left) == (2 * 5 + 1, 0)
    assert type(model.module.get_output_embeddings()) is Int8Linear
    shapes = linear_shapes(model.module)
    assert sum(map(len, shapes.values())) == 11
    assert {name.split()[1] for name in shapes if "head" not in name} == {kind}
    smaller = model.quantised.bfloat16_bytes / model.quantised.num_bytes
    assert smaller > (2.2 if kind == "int4" else 1.9), "the output layer is two fifths of it"


def test_what_does_not_fit_stays_and_the_rest_is_freed() -> None:
    model = nn.Sequential(linear(64, 96), linear(7, 64), linear(8, 7), linear(16, 64))
    weights = [weakref.ref(layer.weight) for layer in model]
    found = quantise_layers(model, "int4")
    assert [type(layer) for layer in model] == [Int4Linear, nn.Linear, nn.Linear, Int4Linear]
    assert [weight() is None for weight in weights] == [True, False, False, True]
    assert (found.num_layers, found.num_left) == (2, 2)
    assert found.bfloat16_bytes == 2 * (64 * 96 + 16 * 64)
    assert "2 linear layers stay bfloat16" in found.description
    model = nn.Sequential(linear(7, 64), linear(64, 40))  # the int8 kernel would read past its end
    quantise_layers(model, "int8")
    assert [type(layer) for layer in model] == [Int8Linear, nn.Linear]


def test_a_model_of_which_nothing_fits_serves_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.engine.quantised.GROUP", 64)  # 96 and 160 are no multiples
    model = load_model(str(make_tiny(tmp_path)), quantise="int8")
    assert model.quantised is not None
    assert model.quantised.num_layers == 0
    assert any(type(layer) is PackedLinear for layer in model.module.modules())
    Runner(model, 4, 16, exact=False).step([Part([0, 1, 2, 3], 0, IDS, True)])


def test_quantised_kv_is_shared_with_nobody_else(folder: Path) -> None:
    identities = [load_model(str(folder), quantise=kind).identity(16) for kind in (None, *KINDS)]
    assert len({identity.root_hash() for identity in identities}) == 3
    for identity in identities[1:]:
        assert identity.differences(identities[0]) == ("weights",)
    again = load_model(str(folder), quantise="int4").identity(16)
    assert again in identities


def test_kinds_that_have_no_kernels_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="int8 weights need bfloat16 on the CPU, not bfloat16 on"):
        load_model(str(folder), device="cuda", quantise="int8")
    with pytest.raises(ValueError, match="'int3' is not one of int4, int8"):
        load_model(str(folder), quantise="int3")
    monkeypatch.setattr(logging.getLogger("foreword"), "handlers", [])
    flags = ["--model", str(folder), "--port", "0", "--dtype", "int4", "--device", "cuda"]
    assert cli.main(["serve", *flags]) == EXIT_CODES["settings"]
    message = capsys.readouterr().err
    assert "int4 weights need bfloat16 on the CPU, not bfloat16 on cuda" in message
    assert message.count("\n") == 1


def test_the_banner_says_it(folder: Path) -> None:
    settings = EngineSettings(str(folder), exact=False, kv_bytes=1 << 20)
    assert "weights" not in TorchEngine.load(settings).banner_facts
    settings = EngineSettings(str(folder), exact=False, kv_bytes=1 << 20, quantise="int4")
    facts = TorchEngine.load(settings).banner_facts
    assert facts["weights"].startswith("int4 in groups of 32, output layer int8, ")


def bench_arguments(folder: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sizes = "--windows 2 --window-tokens 20 --prompt 40 --pairs 1 --exact off"
    return parser.parse_args(["--model", str(folder), *sizes.split()])


def test_bench_quality_compares_with_bfloat16(folder: Path) -> None:
    result = run(bench_arguments(folder))
    quality = result["quality"]
    assert quality["positions"] == result["text"]["tokens"] == 40
    assert 0 < quality["kl_mean"] < quality["kl_p99"]
    assert 0 < quality["top1_agreement"] <= 1
    assert set(quality["perplexity"]) == {"bfloat16", "quantised"}
    for name in ("decode_batch_1", "decode_batch_8", "prefill"):
        assert set(result[name]["tokens_per_s"]) == {"bfloat16", "int4"}


def test_a_model_compared_with_itself_agrees(folder: Path) -> None:
    side = Ours(bench_arguments(folder), exact=False)
    quality = compared(side, side, [IDS[:30]])
    assert (quality["kl_mean"], quality["top1_agreement"]) == (0, 1)
    assert quality["perplexity"]["bfloat16"] == quality["perplexity"]["quantised"]
    with torch.inference_mode():
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.tensor([IDS[:30]])
        loss = plain(ids, labels=ids).loss
    assert quality["perplexity"]["bfloat16"] == pytest.approx(float(loss.exp()), rel=0.05)
