"""Runner: one forward of the model over whatever the scheduler chose for this step."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from foreword.engine.attention import ANY_WIDTH, Part, Step
from foreword.engine.kv import PagedCache, PagedKV, cache_argument
from foreword.engine.model import LoadedModel

__all__ = ["Part", "Runner"]


class Runner:
    """A model and its pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int, exact: bool) -> None:
        self._module = model.module
        self._device = model.module.device
        self.kv = PagedKV(
            model.layers, num_blocks, block_size, model.module.dtype, model.module.device
        )
        self._cache = PagedCache(self.kv)
        self._cache_name = cache_argument(model.module)
        self._last_widths = ANY_WIDTH
        self.exactness = False, "exact mode was not asked for"

    def copy(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of block `src` to block `dst`."""
        self.kv.copy(src, dst, num_tokens)

    @torch.inference_mode()
    def step(self, parts: Sequence[Part]) -> Tensor:
        """Compute the new tokens of all parts in one forward and write their KV.

        Returns logits [parts that want them, vocab], float32, in the order of `parts`.
        """
        step = Step(self.kv, parts, self._last_widths)
        ordered = [parts[i] for i in step.order]
        token_ids = np.fromiter(chain.from_iterable(p.token_ids for p in ordered), np.int64)
        positions = np.concatenate([np.arange(p.start, p.end) for p in ordered])
        rows = np.cumsum([len(p.token_ids) for p in ordered]) - 1
        row_of = dict(zip(step.order, rows, strict=True))
        wanted = [row_of[i] for i, part in enumerate(parts) if part.wants_logits]
        self._cache.slots = step.slots
        output = self._module(
            input_ids=self._row(token_ids),
            position_ids=self._row(positions),
            use_cache=True,
            logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=self._device),
            paged_step=step,
            **{self._cache_name: self._cache},
        )
        logits: Tensor = output.logits[0].float()
        return logits

    def _row(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)[None]
