"""Real vLLM servers above our store: what they evict, what a restart and what others find."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_server import TINY_FLAGS, VllmServer, cached_tokens

SOURCES = "vllm:prompt_tokens_cached_by_source_total"
BLOCKS = "foreword_kv_cache_offload_blocks_{}_total"
PROMPTS = [[(11 * prompt + 7 * i * i + i) % 500 + 3 for i in range(400)] for prompt in range(4)]

StartVllm = Callable[..., VllmServer]


def through_foreword(folder: Path, host_bytes: int) -> dict[str, Any]:
    """vLLM started by `foreword serve`, with its KV in that folder."""
    own = ("-m", "foreword.cli.main", "serve", "--engine", "vllm")
    sizes = ("--disk", f"1GiB:{folder}", "--host-bytes", str(host_bytes))
    return {"command": (sys.executable, *own, *sizes)}


def wait_written(server: VllmServer, num_blocks: int) -> None:
    """vLLM takes our counters with each step of its engine."""
    for _ in range(100):
        if server.metric(BLOCKS.format("stored")) >= num_blocks:
            return
        server.complete([5, 6, 7], max_tokens=1)
    raise AssertionError(server.ask("/metrics"))


def test_what_is_evicted_or_restarted_comes_back_exactly(
    start_vllm: StartVllm, smollm2: Path, tmp_path: Path
) -> None:
    """In float32, where vLLM's own answers do not depend on what was cached."""
    flags = ("--max-model-len", "1024", "--num-gpu-blocks-override", "40")
    prompts = [(prompt * 2)[:790] for prompt in PROMPTS]
    options = through_foreword(tmp_path / "kv", 28 * 32 * 46080)  # for 28 blocks
    server = start_vllm(smollm2, *flags, **options)
    cold = [server.complete(prompt) for prompt in prompts]
    assert [cached_tokens(answer) for answer in cold] == [0] * 4
    warm = server.complete(prompts[3])
    wait_written(server, 4 * 24)
    promoted = server.complete(prompts[0])
    assert cached_tokens(promoted) == 768
    from_disk = server.metric(SOURCES, source="disk")
    assert from_disk == 32 * server.metric(BLOCKS.format("loaded")) == 768
    assert promoted["choices"] == cold[0]["choices"]
    assert warm["choices"] == cold[3]["choices"]
    server.stop(signal.SIGKILL)
    again = start_vllm(smollm2, *flags, **options)
    for prompt, answer in zip(prompts, cold, strict=True):
        restored = again.complete(prompt)
        assert cached_tokens(restored) == 768
        assert restored["choices"] == answer["choices"]
    assert again.metric(SOURCES, source="disk") == 4 * 768
    assert again.metric(BLOCKS.format("loaded")) == 4 * 24
    assert again.metric(BLOCKS.format("lost")) == 0


def test_two_servers_share_one_store(
    start_vllm: StartVllm, tiny_model: Path, tmp_path: Path
) -> None:
    options = through_foreword(tmp_path / "kv", 32 << 20)
    first = start_vllm(tiny_model, *TINY_FLAGS, **options)
    second = start_vllm(tiny_model, *TINY_FLAGS, **options)
    cold = [first.complete(prompt) for prompt in PROMPTS]
    wait_written(first, 4 * 12)
    for prompt, answer in zip(PROMPTS, cold, strict=True):
        shared = second.complete(prompt)
        assert cached_tokens(shared) == 384
        assert shared["choices"] == answer["choices"]
    assert second.metric(SOURCES, source="disk") == 4 * 384


def test_other_weights_dtype_or_adapter_find_nothing(
    start_vllm: StartVllm, tiny_model: Path, tmp_path: Path
) -> None:
    options = through_foreword(tmp_path / "kv", 32 << 20)
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    adapters = [adapter(tmp_path / name, model, seed) for name, seed in (("a", 1), ("b", 2))]
    modules = ("--enable-lora", "--lora-modules", f"a={adapters[0]}")
    first = start_vllm(model, *TINY_FLAGS, *modules, **options)
    plain, adapted = first.complete(PROMPTS[0]), first.complete(PROMPTS[0], model="a")
    assert cached_tokens(adapted) == 0, "an adapter's blocks are its own"
    assert adapted["choices"] != plain["choices"]
    wait_written(first, 24)
    first.stop()

    same = start_vllm(model, *TINY_FLAGS, *modules, **options)
    for name, answer in (("model", plain), ("a", adapted)):
        restored = same.complete(PROMPTS[0], model=name)
        assert cached_tokens(restored) == 384
        assert restored["choices"] == answer["choices"]
    same.stop()

    shutil.copytree(adapters[1], adapters[0], dirs_exist_ok=True)  # by the same name and path
    replaced = start_vllm(model, *TINY_FLAGS, *modules, **options)
    assert cached_tokens(replaced.complete(PROMPTS[0], model="a")) == 0
    replaced.stop()

    other = start_vllm(model, *TINY_FLAGS, "--dtype", "bfloat16", **options)
    assert cached_tokens(other.complete(PROMPTS[0])) == 0
    other.stop()

    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 1  # the last: KV is as it was, and nobody can know
    save_file(tensors, weights, metadata={"format": "pt"})
    changed = start_vllm(model, *TINY_FLAGS, **options)
    assert cached_tokens(changed.complete(PROMPTS[0])) == 0


def adapter(folder: Path, model: Path, seed: int) -> Path:
    """A LoRA adapter of random weights for the first layer's keys."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    heads = config["num_key_value_heads"] * config["head_dim"]
    draw = torch.Generator().manual_seed(seed)
    name = "base_model.model.model.layers.0.self_attn.k_proj"
    folder.mkdir()
    save_file(
        {
            f"{name}.lora_A.weight": torch.randn(8, hidden, generator=draw),
            f"{name}.lora_B.weight": torch.randn(heads, 8, generator=draw),
        },
        folder / "adapter_model.safetensors",
    )
    settings = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["k_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
