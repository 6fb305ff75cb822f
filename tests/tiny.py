"""Tiny random-weight Hugging Face models with a real tokenizer, made in code, for the tests."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = (
    "A foreword is the opening that many readers share; it should be read once.",
    "The system prompt of an assistant is long, and it is the same for every user.",
    "You are a helpful assistant. Answer the question of the user in one sentence.",
    "def match(tokens, prefix): return tokens[: len(prefix)] == prefix  # 0123456789",
)
_MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 48}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}

# Of real models, as their config.json says.
QWEN3_0_6B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "initializer_range": 0.02,
}
LLAMA_3_2_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "initializer_range": 0.02,
}


def make_tiny(
    folder: Path,
    kind: str = "llama",
    max_model_len: int = 1024,
    num_layers: int = 2,
    shape: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model folder (weights, config, tokenizer, chat template) and return it.

    `kind` is one of _MODELS; mistral and gemma3 have a sliding window of 48 tokens. The weights,
    norms and biases too, depend on `kind` and `num_layers` alone, and are large enough
    that logits differ clearly. `shape` replaces what the config says of sizes; the weights are then
    bfloat16, as large models' are.
    """
    tokenizer = make_tokenizer()
    eos, start, end = (tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS)
    config_class, model_class, extra = _MODELS[kind]
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": max_model_len,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        "bos_token_id": start,
        "eos_token_id": end,
        "pad_token_id": eos,
    }
    config = config_class(**{**sizes, **extra, **(shape or {})})
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn(parameter.shape)
        if shape:
            model.to(torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens that can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
