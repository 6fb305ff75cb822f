"""Which models run fused layers; that those compute the same is tests/unit/test_runner.py's."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from foreword.engine import model as model_module
from foreword.engine.decoder import FusedLayer, Norm
from foreword.engine.model import load_model
from foreword.engine.runner import Part, Runner
from tiny import make_tiny

IDS = list(range(3, 63))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "olmo2"])
def test_layers_are_fused_where_they_are_known(kind: str, tmp_path: Path) -> None:
    layers = load_model(str(make_tiny(tmp_path, kind))).module.base_model.layers
    fused = [isinstance(layer, FusedLayer) for layer in layers]
    assert fused == [kind != "olmo2"] * 2


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_plain_weights_give_the_same(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_tiny(tmp_path, kind))
    packed = load_model(folder, dtype="float32")
    monkeypatch.setattr(model_module, "pack", lambda _module: None)
    plain = load_model(folder, dtype="float32")
    assert any(type(layer) is nn.Linear for layer in plain.module.base_model.modules())
    expected, got = (
        Runner(model, 8, 16, exact=False).step([Part(list(range(4)), 0, IDS, True)])
        for model in (packed, plain)
    )
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_leaves_its_rows_and_is_no_further_off_than_transformers(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    plain = LlamaRMSNorm(96, eps=1e-2).to(dtype).requires_grad_(False)
    plain.weight += torch.randn(96).to(dtype)
    rows = torch.randn(7, 3, 96).to(dtype)
    rows[0] = 0
    rows[1] /= 100  # where the epsilon is most of it
    kept = rows.clone()
    got = Norm(plain)(rows)
    assert torch.equal(rows, kept)
    values = rows.double()
    exact = values / (values.square().mean(-1, keepdim=True) + 1e-2).sqrt() * plain.weight.double()
    error = (got.double() - exact).abs().max()
    assert error <= (plain(rows).double() - exact).abs().max() + 1e-6
    assert got.dtype is dtype
