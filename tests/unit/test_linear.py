"""Packed linear layers: the same function, in another layout."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from foreword.engine.exact import COUNTS
from foreword.engine.linear import Gated, PackedGated, PackedLinear, pack, padded_count

PACKS = torch.backends.mkldnn.is_available()


@pytest.mark.skipif(not PACKS, reason="this torch has no oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packing_changes_the_layout_and_not_the_layer(dtype: torch.dtype, bias: bool) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this processor")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 40, bias=bias), nn.Sequential(nn.Linear(40, 7)), nn.ReLU())
    model.to(dtype).requires_grad_(False)
    rows = torch.randn(2, 9, 96, dtype=dtype)
    expected = model(rows)
    pack(model)
    layer = model[0]
    assert isinstance(layer, PackedLinear)
    assert isinstance(model[1][0], PackedLinear)
    assert (layer.in_features, layer.out_features) == (96, 40)
    torch.testing.assert_close(model(rows), expected)
    assert model(rows[:, :0]).shape == (2, 0, 7)


@pytest.mark.skipif(not PACKS, reason="this torch has no oneDNN")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gated_product_is_packed_as_one_where_it_is_gated_by_silu(
    activation: str, bias: bool
) -> None:
    torch.manual_seed(0)
    gate, up = (nn.Linear(96, 40, bias=bias).requires_grad_(False) for _ in range(2))
    model = nn.Sequential(Gated(gate, up, ACT2FN[activation]))
    rows = torch.randn(5, 96)
    expected = ACT2FN[activation](gate(rows)) * up(rows)
    torch.testing.assert_close(model(rows), expected)
    pack(model)
    assert isinstance(model[0], PackedGated) is (activation == "silu")
    assert all(type(layer) is not nn.Linear for layer in model.modules())
    torch.testing.assert_close(model(rows), expected)


def test_few_numbers_of_rows_are_met() -> None:
    counts = [padded_count(num_rows) for num_rows in range(2049)]
    assert len(set(counts)) < 60
    assert counts == sorted(counts)
    assert counts[:9] == list(range(9))
    for num_rows, count in enumerate(counts):
        assert 0 <= count - num_rows <= max(15, num_rows // 8)
        assert padded_count(count) == count
    assert padded_count(5000) == 5120
    assert padded_count(8192) == 8192
    # What exact mode measures and calls is what it asks for.
    assert [padded_count(count) for count in COUNTS] == list(COUNTS)


@pytest.mark.skipif(not PACKS, reason="this torch has no oneDNN")
@pytest.mark.parametrize("shape", [(11,), (1, 77), (3, 333)])
def test_padding_changes_no_row(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    gate, up, down = nn.Linear(96, 40), nn.Linear(96, 40), nn.Linear(40, 7)
    model = nn.Sequential(Gated(gate, up, ACT2FN["silu"]), down).requires_grad_(False)
    rows = torch.randn(*shape, 96)
    expected = model(rows)
    pack(model)
    met: list[int] = []
    product = PackedLinear._pointwise

    def pointwise(layer: PackedLinear, rows: torch.Tensor, function: str) -> torch.Tensor:
        met.append(rows[..., 0].numel())
        return product(layer, rows, function)

    monkeypatch.setattr(PackedLinear, "_pointwise", pointwise)
    torch.testing.assert_close(model(rows), expected)
    assert met == [padded_count(rows[..., 0].numel())] * 2


def test_a_tied_embedding_keeps_its_rows() -> None:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(12, 32), "head": nn.Linear(32, 12, bias=False)}
    )
    model.requires_grad_(False)
    embedding, head = model["embedding"], model["head"]
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    head.weight = embedding.weight
    before = embedding.weight.clone()
    rows = torch.randn(3, 32)
    expected = head(rows)
    pack(model)
    assert torch.equal(embedding.weight, before)
    torch.testing.assert_close(model["head"](rows), expected)


def test_another_device_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8, device="meta"))
    pack(model)
    assert type(model[0]) is nn.Linear
