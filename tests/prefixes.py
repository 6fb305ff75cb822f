"""Prompts and answers for the tests of PrefixCache."""

import torch
from transformers import AutoModelForCausalLM

from foreword.plugins.transformers import prefix
from foreword.plugins.transformers.prefix import PrefixCache

MIB = 1 << 20
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, size, float32


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def patient(monkeypatch):
    """The machine may be slow: what was stored is there when it is asked for."""
    monkeypatch.setattr(prefix, "WRITTEN_S", 10.0)
    monkeypatch.setattr(prefix, "STORE_S", 10.0)


def small(model, folder):
    """A cache with room for some prompts of a tiny model."""
    return PrefixCache(model, host_bytes=4 * MIB, disk_bytes=16 * MIB, disk_folder=folder)


def prompt(num_tokens, seed=0, rows=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, 500, (rows, num_tokens), generator=draw)


def plain(model, token_ids, **options):
    return model.generate(token_ids, **{"max_new_tokens": 12, "do_sample": False, **options})


def reused(cache, token_ids, **options):
    """An answer with the cache, and how many prompt tokens were not computed for it."""
    before = cache.stats.num_reused_tokens
    output = plain(cache, token_ids, **options)
    return output, cache.stats.num_reused_tokens - before
