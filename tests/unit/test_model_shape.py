"""ModelShape: sizes and work from a config, held against transformers' own modules."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs import LLAMA, PUBLISHED
from foreword.sim.catalogue import MODELS
from foreword.sim.model import COUNTED, ShapeError, read_shape, shape_of


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_catalogue_is_what_the_published_config_says(name: str) -> None:
    counted, listed = shape_of(PUBLISHED[name], name), MODELS[name]
    assert counted.kv_numbers == listed.kv_numbers
    assert (counted.attention, counted.num_layers, counted.context, counted.weights_dtype) == (
        (listed.attention, listed.num_layers, listed.context, listed.weights_dtype)
    )
    assert (counted.window, counted.num_window_layers, counted.flops_per_pair) == (
        (listed.window, listed.num_window_layers, listed.flops_per_pair)
    )
    assert counted.num_params == pytest.approx(listed.num_params, rel=0.005)
    # gpt-oss's card leaves the embedding out
    assert counted.num_active_params == pytest.approx(listed.num_active_params, rel=0.12)


@pytest.mark.parametrize("kind", sorted({*COUNTED} - {"kimi_k2"}))  # which is DeepSeek V3's
def test_parameters_and_kv_are_those_of_transformers(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    more = {"num_experts_per_tok": 6, "n_routed_experts": 64} if kind == "deepseek_v2" else {}
    config = transformers.CONFIG_MAPPING[kind](**more)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict(), kind)
    num_params = sum(parameter.numel() for parameter in module.parameters())
    assert shape.num_params == pytest.approx(num_params, rel=0.003)
    assert shape.num_active_params <= shape.num_params
    if shape.latent_size:
        rank = config.kv_lora_rank + config.qk_rope_head_dim
        assert shape.kv_numbers == config.num_hidden_layers * rank
    else:
        layer = module.model.layers[0].self_attn
        assert shape.head_size == layer.head_dim
        assert shape.num_kv_heads == config.num_key_value_heads
    sliding = [kind for kind in getattr(config, "layer_types", None) or () if "sliding" in kind]
    assert shape.num_window_layers in (len(sliding), shape.num_layers if shape.window else 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "mamba"}, "'mamba' is none whose parameters can be counted"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": 33}, "head_dim is missing, and hidden_size 4096 is no multiple"),
        ({"vocab_size": "many"}, "vocab_size is 'many', no whole number"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'"),
        ({"kv_lora_rank": 512}, "qk_nope_head_dim is missing"),
        ({"n_routed_experts": 4}, "num_experts_per_tok is missing"),
    ],
)
def test_a_config_that_lacks_something_is_refused_by_name(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ShapeError, match=words):
        shape_of({**LLAMA, **changes}, "x")


def test_a_folder_and_a_file_are_read_and_others_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = read_shape(tmp_path)
    assert shape == read_shape(tmp_path / "config.json")
    assert (shape.name, shape.kv_numbers) == (tmp_path.name, 65536)
    for text, words in (("{", "is no JSON"), ("[]", "holds no object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ShapeError, match=words):
            read_shape(tmp_path)
    with pytest.raises(ShapeError, match="cannot be read: No such file"):
        read_shape(tmp_path / "nowhere.json")


def test_weights_of_an_unknown_type_ask_for_their_size() -> None:
    shape = shape_of({**LLAMA, "quantization_config": {"quant_method": "awq"}}, "x")
    with pytest.raises(ShapeError, match="'awq' are not known; say them with --weights-dtype"):
        shape.weights_bytes()
    assert shape.weights_bytes("int4") == shape.num_params / 2


def test_windows_are_charged_for_each_token_alike() -> None:
    shape = MODELS["gpt-oss-20b"]
    step = shape.step_cost(1.0)
    pair = 4 * 64 * 64
    assert step.per_pair_s == 12 * pair
    assert step.per_token_s == 2 * shape.num_active_params + 12 * 128 * pair
