"""Exact mode in other models: experts, and one layer each in the shape of real models."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest

from foreword.cli.verify import compare
from tiny import LLAMA_3_2_1B, QWEN3_0_6B, make_tiny

# Fewer tokens in the vocabulary, and in Llama's case fewer inner ones: most of the test's time.
SHAPES: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "qwen3_moe": ("qwen3_moe", None, "bfloat16"),
    "qwen3_moe-float32": ("qwen3_moe", None, "float32"),
    "Qwen3-0.6B": ("qwen3", {**QWEN3_0_6B, "vocab_size": 2048}, "bfloat16"),
    "Llama-3.2-1B": (
        "llama",
        {**LLAMA_3_2_1B, "vocab_size": 2048, "intermediate_size": 2048},
        "bfloat16",
    ),
}


@pytest.mark.parametrize(("kind", "shape", "dtype"), SHAPES.values(), ids=list(SHAPES))
def test_exact_mode_keeps_its_word(
    tmp_path: Path, kind: str, shape: dict[str, Any] | None, dtype: str
) -> None:
    """Not a bit differs, or the self-test has said so."""
    folder = make_tiny(tmp_path / "model", kind, num_layers=1 if shape else 2, shape=shape)
    args = argparse.Namespace(
        model=str(folder), dtype=dtype, threads=2, prompts=6, longest=300, new_tokens=3, seed=1
    )
    result = asyncio.run(compare(args))
    assert result["reused_tokens"] > 100
    assert result["logits_compared"] == 4 * 6 * 3
    if result["exact"]:
        assert (result["different_prompts"], result["largest_difference"]) == (0, 0)
    else:
        assert "the self-test found other bits" in result["reason"]
