"""PrefixCache: transformers' `generate` with reuse across calls and processes.

What a call computed is cut into blocks and kept; the next call whose tokens begin alike starts
from them and computes the rest. What cannot be reused safely is computed as ever, and
`PrefixCache.stats` says why.
"""

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.configuration_utils import GenerationMode

from foreword.core.block import BlockHash, Chain
from foreword.core.identity import Identity
from foreword.core.stats import TierStats
from foreword.plugins.outer import Block, Budgets, OuterCache
from foreword.plugins.transformers.weights import attention_of, digest_of, signs_of, why_unsafe
from foreword.store.files import kv_folder

BLOCK_SIZE = 16  # tokens
LAYOUT = "layer,keys|values,kv_head,token,head_size"
STORE_BYTES = 32 << 20  # stored at once
STORE_STEPS = 3  # times that may wait to be written
STORE_S = 2.0  # a call waits that long, at most, until they are
WRITTEN_S = 0.25  # and for what the call before it stored, to find it
CLOSE_S = 10.0
# OuterCache adds the Identity: here a key names tokens alone.
_ROOT = BlockHash(bytes(32))
# Arguments that change how tokens are chosen, not what their KV is.
_CHOOSING = {
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer"),
    *("synced_gpus", "negative_prompt_ids", "negative_prompt_attention_mask", "tokenizer"),
}
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
log = logging.getLogger("foreword.transformers")


@dataclass(slots=True)
class PrefixStats:
    """What a PrefixCache has done. Of calls that it passed through it counts the reasons only."""

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0  # of these: not computed again
    passed_through: Counter[str] = field(default_factory=Counter)  # calls, by why
    tiers: tuple[TierStats, ...] = ()


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The tokens of one call, as `generate` sees them."""

    rows: list[list[int]]  # without padding
    paddings: list[int]  # tokens to the left of each row
    num_samples: int  # of each row


class PrefixCache:
    """`generate` of one model, which starts where an earlier call had the same tokens.

    Weights are named by a digest of the tensors in memory, so that training, a merged adapter or
    another dtype never meets KV of the model as it was. It is taken here, which takes seconds per
    GB, and holds while the model stays as it is. A change of weights, modules or configuration is
    noticed at the next call, and nothing is reused from then on: make a new PrefixCache. Noticed
    are all writes that torch counts (optimizers, `load_state_dict`), and of others (`.data`, numpy)
    those that change one of the elements that are looked at, 16 in each tensor: after an edit
    of a few weights through `.data` make a new one unasked.

    Answers are those of `model.generate` up to rounding: a prompt computed in two parts, with any
    cache, differs from one computed whole in the last bits. For any thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        host_bytes: int = 1 << 30,
        disk_bytes: int = 10 << 30,
        disk_folder: Path | str | None = None,
    ) -> None:
        """Bytes that KV may take in memory and on disk; 0: none there. Processes may share
        `disk_folder`; where none is given it is in the user's cache folder. Raises ValueError for
        what is no number of bytes."""
        self._model = model
        self._process = os.getpid()
        self._lock = threading.Lock()  # of the counts
        self._counts = PrefixStats()
        unsafe = why_unsafe(model) or self._probe()
        self._unsafe = f"the model {unsafe}" if unsafe else None
        self._outer: OuterCache | None = None
        if self._unsafe:
            log.warning("nothing will be reused: %s", self._unsafe)
            return
        self._signs = signs_of(model)
        identity = self._identity()
        folder = kv_folder() if disk_folder is None else Path(disk_folder).expanduser()
        budgets = Budgets(host_bytes, disk_bytes, folder)
        self._outer = OuterCache(lambda: identity, self._block_bytes, budgets)
        self._outer.wait_open(CLOSE_S)
        self._close = weakref.finalize(self, self._outer.close, CLOSE_S)  # at exit, too

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def stats(self) -> PrefixStats:
        """Counts since it was made."""
        with self._lock:
            counts = replace(self._counts, passed_through=self._counts.passed_through.copy())
        counts.tiers = self._outer.stats if self._outer else ()
        return counts

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Whether all that was kept so far is written within that time."""
        return self._outer is None or self._outer.flush(timeout_s)

    def close(self) -> None:
        """Write what waits; nothing is reused afterwards. The end of the process does it, too."""
        if self._outer is not None:
            self._close()

    def generate(self, *args: Any, **options: Any) -> Any:
        """As `model.generate`: the same arguments, the same answer."""
        model: Any = self._model
        prompts = self._prompts(args, options)
        if self._outer is None or isinstance(prompts, str):
            with self._lock:
                self._counts.passed_through[str(prompts)] += 1
            log.info("passed through: %s", prompts)
            return model.generate(*args, **options)
        self._outer.flush(WRITTEN_S)
        cache = self._new_cache()
        num_reused = self._restore(self._outer, prompts, cache)
        output = model.generate(*args, **options, cache=cache)
        sequences = output if isinstance(output, Tensor) else output.sequences
        self._keep(self._outer, prompts, sequences, cache)
        with self._lock:
            self._counts.num_prompt_tokens += sum(map(len, prompts.rows))
            self._counts.num_reused_tokens += sum(num_reused)
        return output

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    @torch.no_grad()
    def _probe(self) -> str | None:
        """Compute one token to see what KV looks like; why it cannot be kept."""
        model: Any = self._model
        cache = self._new_cache()
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            return "has layers that do not keep the KV of every token"
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=token, use_cache=True, cache=cache)
        parts = _parts(cache)
        if not parts or len({part.dtype for part in parts}) != 1:
            return "has layers without KV, or of several dtypes"
        # Of keys and values of each layer: KV heads, head size.
        self._shapes = [(part.shape[1], part.shape[3]) for part in parts]
        self._widths = [BLOCK_SIZE * num_heads * size for num_heads, size in self._shapes]
        self._dtype = parts[0].dtype
        self._block_bytes = self._dtype.itemsize * sum(self._widths)
        return None

    def _identity(self) -> Identity:
        num_heads, size = self._shapes[0]
        return Identity(
            weights=digest_of(self._model),
            dtype=str(self._dtype).removeprefix("torch."),
            num_layers=len(self._shapes) // 2,
            num_kv_heads=num_heads,
            head_size=size,
            attention=attention_of(self._model),
            layout=LAYOUT,
            parallel="",
            lora="",
            block_size=BLOCK_SIZE,
            tokenizer="",
            chat_template="",
            numerics="",
        )

    def _prompts(self, args: Sequence[Any], options: Mapping[str, Any]) -> _Prompts | str:
        """The tokens whose KV a call computes, or why it is passed through."""
        if reason := self._unsafe or self._why_not_now():
            return reason
        if len(args) > 2:
            return "more than two arguments by position"
        inputs, given = (*args, None, None)[:2]
        settings = {name: value for name, value in options.items() if name not in _CHOOSING}
        inputs = settings.pop("inputs", inputs)
        given = settings.pop("generation_config", given)
        model: Any = self._model
        config, other = model._prepare_generation_config(given, **settings)
        token_ids = other.pop("input_ids", None) if inputs is None else inputs
        mask = other.pop("attention_mask", None)
        if other := {name: value for name, value in other.items() if value is not None}:
            return f"argument {min(other)}"
        mode = config.get_generation_mode()
        if mode not in _MODES:
            return str(mode.value)
        kinds = {
            "no cache": config.use_cache is False,
            "another cache": config.cache_implementation,
            "token_healing": config.token_healing,
            "prefill_chunk_size": config.prefill_chunk_size,
        }
        if reason := next((reason for reason, applies in kinds.items() if applies), None):
            return reason
        if token_ids is None or token_ids.dim() != 2 or not token_ids.numel():
            return "no token ids"
        mask = _mask(token_ids, config) if mask is None else mask
        if mask.shape != token_ids.shape:
            return "an attention mask of another length"
        if ((mask != 0) & (mask != 1)).any():  # positions are sums of it
            return "an attention mask not of 0 and 1"
        mask = mask.bool()
        if (mask[:, :-1] & ~mask[:, 1:]).any() or not mask[:, -1].all():
            return "padding that is not to the left"
        paddings = (~mask).sum(1).tolist()
        rows = [row[skip:] for row, skip in zip(token_ids.tolist(), paddings, strict=True)]
        return _Prompts(rows, paddings, config.num_return_sequences)

    def _why_not_now(self) -> str | None:
        if not self._close.alive:
            return "closed"
        if os.getpid() != self._process:
            return "a forked process"
        if self._model.training:
            return "training mode"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast"
        if why_unsafe(self._model) or signs_of(self._model) != self._signs:
            return "the model has changed"
        return None

    def _restore(self, outer: OuterCache, prompts: _Prompts, cache: DynamicCache) -> list[int]:
        """Fill a cache with what is known; returns how many tokens of each row that is. All rows
        go on from one place, so the least known decides."""
        end = prompts.paddings[0] + len(prompts.rows[0]) - 1  # the last gives the first logits
        found = []
        for row, padding in zip(prompts.rows, prompts.paddings, strict=True):
            wanted = -(-max(0, end - padding) // BLOCK_SIZE) * BLOCK_SIZE
            found.append(self._load(outer, row[: min(len(row) - 1, wanted)]))
            end = min(end, padding + len(found[-1]) * BLOCK_SIZE)
        num_reused = [max(0, end - padding) for padding in prompts.paddings]
        if not any(num_reused):
            return num_reused
        device = self._model.device
        known = [self._unpacked(blocks.to(device)) for blocks in found]
        whole = []
        for at, (num_heads, size) in enumerate(self._shapes):
            part = known[0][at].new_empty(len(found), num_heads, end, size)
            for row_at, num_tokens in enumerate(num_reused):
                part[row_at, :, : end - num_tokens] = 0  # padding: nobody looks at it
                part[row_at, :, end - num_tokens :] = known[row_at][at][:, :num_tokens]
            whole.append(part)
        for at in range(0, len(whole), 2):
            cache.update(whole[at], whole[at + 1], at // 2)
        if prompts.num_samples > 1:
            cache.batch_repeat_interleave(prompts.num_samples)
        return num_reused

    def _load(self, outer: OuterCache, token_ids: Sequence[int]) -> Tensor:
        """Known blocks of a row, from the first on: [blocks, elements]."""
        blocks = _blocks(token_ids)
        packed = torch.empty(len(blocks), sum(self._widths), dtype=self._dtype)
        lost = outer.load(blocks, _octets(packed)) if blocks else []
        num_known = next((at for at, reason in enumerate(lost) if reason), len(lost))
        outer.touch(blocks[:num_known])
        return packed[:num_known]

    def _keep(
        self, outer: OuterCache, prompts: _Prompts, sequences: Tensor, cache: DynamicCache
    ) -> None:
        """Store all full blocks that a call has computed."""
        parts = _parts(cache)
        num_slots = cache.get_seq_length()  # the newest token has no KV yet
        if [(p.shape[1], p.shape[3], p.dtype) for p in parts] != [
            (*shape, self._dtype) for shape in self._shapes
        ]:
            return
        end_s = time.monotonic() + STORE_S
        step = max(1, STORE_BYTES // self._block_bytes)
        num_stored = 0
        for row, token_ids in enumerate(sequences.tolist()):
            padding = prompts.paddings[row // prompts.num_samples]
            blocks = _blocks(token_ids[padding:num_slots])
            for start in range(outer.num_everywhere(blocks), len(blocks), step):
                some = blocks[start : start + step]
                if num_stored + len(some) > STORE_STEPS * step:
                    outer.flush(max(0.0, end_s - time.monotonic()))
                    num_stored = 0
                first = padding + start * BLOCK_SIZE
                slots = slice(first, first + len(some) * BLOCK_SIZE)
                packed = _packed([part[row, :, slots] for part in parts])
                if not all(outer.store(some, _octets(packed))):
                    break
                num_stored += len(some)

    def _unpacked(self, packed: Tensor) -> list[Tensor]:
        """Of keys and values of each layer: [KV heads, tokens, head size]."""
        parts: tuple[Tensor, ...] = torch.split(packed, self._widths, 1)
        return [
            part.reshape(-1, num_heads, BLOCK_SIZE, size).transpose(0, 1).flatten(1, 2)
            for part, (num_heads, size) in zip(parts, self._shapes, strict=True)
        ]


def _parts(cache: DynamicCache) -> list[Tensor]:
    """Keys, then values of each layer: [rows, KV heads, slots, head size]. Nothing where a layer
    keeps something else."""
    layers: list[Any] = list(cache.layers)
    parts = [
        part
        for layer in layers
        if type(layer) is DynamicLayer
        for part in (layer.keys, layer.values)
        if part is not None
    ]
    return parts if len(parts) == 2 * len(layers) else []


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """A row's KV as blocks, on the CPU: [blocks, elements], from [KV heads, tokens, head size]."""
    by_block = [
        part.reshape(len(part), -1, BLOCK_SIZE * part.shape[2]).transpose(0, 1).flatten(1)
        for part in parts
    ]
    return torch.cat(by_block, 1).cpu()


def _mask(token_ids: Tensor, config: GenerationConfig) -> Tensor:
    """What `generate` takes for the attention mask where it is given none."""
    pad, ends = config.pad_token_id, config.eos_token_id
    if pad is None or pad in (ends if isinstance(ends, list) else [ends]):
        return torch.ones_like(token_ids)
    return token_ids.ne(pad)


def _blocks(token_ids: Sequence[int]) -> list[Block]:
    hashes = Chain(_ROOT, BLOCK_SIZE, token_ids).hashes
    parents = [None, *hashes]
    return [Block(key, parents[at], at) for at, key in enumerate(hashes)]


def _octets(packed: Tensor) -> list[memoryview]:
    """The bytes of each block."""
    return [memoryview(row) for row in packed.view(torch.uint8).numpy()]
