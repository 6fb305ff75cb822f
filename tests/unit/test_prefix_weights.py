"""PrefixCache keeps no KV of a model that it cannot name, or that has changed."""

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from foreword.plugins.transformers.prefix import PrefixCache
from foreword.plugins.transformers.weights import digest_of, why_unsafe
from prefixes import load, patient, plain, prompt, reused, small
from tiny import make_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = ("llama", "mistral", "gemma3")
    return {kind: make_tiny(tmp_path_factory.mktemp(kind), kind) for kind in kinds}


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    patient(monkeypatch)


@pytest.fixture
def model(folders):
    return load(folders["llama"])


@pytest.fixture
def cache(model, tmp_path):
    with small(model, tmp_path / "kv") as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mistral", "the model has layers that do not keep the KV of every token"),
        ("gemma3", "the model has layers that do not keep the KV of every token"),
    ],
)
def test_models_whose_kv_is_not_whole(folders, kind, reason, tmp_path):
    model = load(folders[kind])
    with PrefixCache(model, disk_folder=tmp_path) as cache:
        for _ in range(2):
            assert reused(cache, prompt(70))[0].tolist() == plain(model, prompt(70)).tolist()
        assert cache.stats.passed_through == {reason: 2}
        assert cache.flush()


def test_models_that_are_refused(model):
    kinds = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    assert why_unsafe(T5ForConditionalGeneration(kinds)) == "is an encoder-decoder"
    model.config.rope_parameters["rope_type"] = "dynamic"
    assert why_unsafe(model).startswith("has dynamic RoPE")
    model.config.rope_parameters["rope_type"] = "default"
    assert why_unsafe(model) is None


class Adapter(nn.Linear):
    """Code that no digest covers."""


def train(model):
    step = torch.optim.SGD(model.parameters(), lr=0.1)
    model(prompt(8), labels=prompt(8)).loss.backward()
    step.step()


def merge(model):
    model.model.layers[1].mlp.up_proj.weight.data += 0.01  # as peft merges an adapter


def adapt(model):
    model.model.layers[0].mlp.up_proj = Adapter(96, 160, bias=False)


def hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)


def replace_forward(model):
    layer = model.model.layers[0]
    layer.forward = layer.forward


def attend_otherwise(model):
    model.set_attn_implementation("eager")


@pytest.mark.parametrize(
    "change", [train, merge, adapt, hook, replace_forward, attend_otherwise, nn.Module.double]
)
def test_a_changed_model_reuses_nothing(model, cache, change):
    reused(cache, prompt(70))
    change(model)
    assert reused(cache, prompt(70))[0].tolist() == plain(model, prompt(70)).tolist()
    assert cache.stats.passed_through == {"the model has changed": 1}


@pytest.mark.parametrize("change", [train, merge, attend_otherwise, nn.Module.double])
def test_a_changed_model_has_blocks_of_its_own(model, cache, change, tmp_path):
    reused(cache, prompt(70))
    change(model)
    with PrefixCache(model, disk_folder=tmp_path / "kv") as other:
        expected = plain(model, prompt(70)).tolist()
        for num_known in (0, 64):
            output, num_reused = reused(other, prompt(70))
            assert (output.tolist(), num_reused) == (expected, num_known)


def test_training_mode_and_autocast(model, cache):
    model.train()
    plain(cache, prompt(70))
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        plain(cache, prompt(70))
    assert cache.stats.passed_through == {"training mode": 1, "autocast": 1}
    assert reused(cache, prompt(70))[1] == 0


def test_the_digest_is_of_the_weights(folders, model):
    digest = digest_of(model)
    assert digest_of(load(folders["llama"])) == digest
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert digest_of(model) != digest
