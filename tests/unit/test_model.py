"""Loading models: what is found, what is refused by name, and what an Identity depends on."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from foreword.engine.kv import LayerShape
from foreword.engine.model import load_model, probe_layers, refuse_by_config
from foreword.engine.source import ModelNotFound, ModelRefused
from tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_CACHE_DIR", str(tmp_path / "cache"))


def test_what_is_known_of_a_model(folder: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    assert model.name == folder.name
    assert model.vocab_size == 512
    assert model.max_model_len == 1024
    assert model.eos_token_ids == {2}
    assert model.special_token_ids == {0, 1, 2}
    assert model.layers == (LayerShape(2, 16, 16, None),) * 2
    assert model.block_bytes(16) == 16 * 2 * 2 * 2 * 16 * 4  # tokens layers k+v heads size bytes
    assert model.module.dtype == torch.float32
    assert not model.module.training


def test_sliding_windows_are_seen(tmp_path: Path) -> None:
    model = load_model(str(make_tiny(tmp_path, "mistral")))
    assert {layer.window for layer in model.layers} == {48}


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", r"no \*.safetensors"),
        ("tokenizer.json", "cannot be loaded|no fast tokenizer"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path: Path, remove: str, message: str) -> None:
    (make_tiny(tmp_path) / remove).unlink()
    with pytest.raises((ModelNotFound, ModelRefused), match=message):
        load_model(str(tmp_path))


def test_broken_files_are_one_clear_error(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelNotFound, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_an_unknown_dtype(folder: Path) -> None:
    with pytest.raises(ValueError, match="'float16' is not one of bfloat16, float32"):
        load_model(str(folder), dtype="float16")


def test_more_context_than_trained_is_allowed_and_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "foreword"):
        assert load_model(str(folder), max_model_len=512).max_model_len == 512
        assert not caplog.records
        assert load_model(str(folder), max_model_len=4096).max_model_len == 4096
    assert "4096 is more than the 1024 positions" in caplog.text


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention layers"),
        ({"layer_types": ["conv", "full_attention"]}, "conv layers"),
        ({"attention_chunk_size": 8192}, "in chunks"),
        ({"attn_logit_softcapping": 50.0}, "soft-caps"),
        ({"is_causal": False}, "both directions"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic RoPE"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope RoPE"),
    ],
)
def test_what_cannot_share_blocks_is_refused_by_name(extra: dict[str, Any], reason: str) -> None:
    config = SimpleNamespace(**({"model_type": "odd", "is_encoder_decoder": False} | extra))
    config.get_text_config = lambda: config
    with pytest.raises(ModelRefused, match=f"odd cannot share KV blocks: .*{reason}"):
        refuse_by_config(config)


def test_attention_sinks_are_seen_by_running_the_model() -> None:
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    with pytest.raises(ModelRefused, match="gpt_oss cannot share KV blocks: its attention has sin"):
        probe_layers(GptOssForCausalLM(config).eval())


def test_identity_names_what_differs(tmp_path: Path, folder: Path) -> None:
    model = load_model(str(folder))
    identity = model.identity(16)
    assert identity == load_model(str(folder)).identity(16)
    assert identity.differences(model.identity(32)) == ("block_size",)
    assert identity.differences(model.identity(16, "exact")) == ("numerics",)
    exact32 = load_model(str(folder), dtype="float32").identity(16)
    assert identity.differences(exact32) == ("dtype",)

    make_tiny(tmp_path)
    assert identity == load_model(str(tmp_path)).identity(16), "the folder's name is no part of it"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert identity.differences(load_model(str(tmp_path)).identity(16)) == ("attention",)

    make_tiny(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (tmp_path / "chat_template.jinja").write_text("other")
    changed = load_model(str(tmp_path)).identity(16)
    assert identity.differences(changed) == ("weights", "chat_template")
    assert replace(changed, weights=identity.weights).differences(identity) == ("chat_template",)


def test_missing_weights_are_not_drawn_at_random(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    left = {name: weight for name, weight in weights.items() if "layers.1." not in name}
    save_file(left, file, metadata={"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"no weights for model\.layers\.1\..* more"):
        load_model(str(folder))


@pytest.mark.parametrize("size", [0, 7, 5000])
def test_a_file_that_was_cut_off_is_said_to_be_so(tmp_path: Path, size: int) -> None:
    folder = make_tiny(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelNotFound, match="cannot be loaded"):
        load_model(str(folder))


@pytest.mark.parametrize("change", [{"hidden_size": "many"}, {"num_attention_heads": 0}])
def test_a_config_that_makes_no_model_is_said_to_be_so(
    tmp_path: Path, change: dict[str, object]
) -> None:
    folder = make_tiny(tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ModelNotFound, match="cannot be loaded"):
        load_model(str(folder))


@pytest.mark.parametrize("positions", [0, -5])
def test_a_model_without_positions_is_refused(tmp_path: Path, positions: int) -> None:
    folder = make_tiny(tmp_path)
    file = folder / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "max_position_embeddings": positions})
    )
    with pytest.raises(ModelRefused, match="positions"):
        load_model(str(folder))


@pytest.mark.parametrize("source", ["~nobody-has-this-name/x", "x" * 300])
def test_an_impossible_path_is_a_model_not_found(source: str) -> None:
    with pytest.raises(ModelNotFound):
        load_model(source)
