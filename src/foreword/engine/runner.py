"""Runner: one forward of the model over whatever the scheduler chose for this step."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from foreword.engine.attention import ANY_RULES, Packed, Part
from foreword.engine.exact import Exactness, ExactRules, row_exact_layers
from foreword.engine.kv import PagedCache, PagedKV, cache_argument
from foreword.engine.model import LoadedModel
from foreword.engine.verdict import find_rules, kernel_settings

__all__ = ["Part", "Runner"]


class Runner:
    """A model and its pool of `num_blocks` blocks of `block_size` tokens.

    With `exact`, the start measures and tests the machine for some seconds; `exactness` says what
    came of it. Set the number of threads before: the bits depend on it.
    """

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int, exact: bool) -> None:
        self.model = model
        self.kv = PagedKV(
            model.layers, num_blocks, block_size, model.module.dtype, model.module.device
        )
        self._exactness = (
            find_rules(model, partial(partial, forward, model))
            if exact
            else Exactness(False, "turned off by a setting")
        )

    @property
    def exactness(self) -> tuple[bool, str]:
        """Whether the cache never changes an answer, bit for bit, and why or why not."""
        return self._exactness.exact, self._exactness.reason

    @property
    def numerics(self) -> str:
        """What the bits depend on beside the model, for the Identity. Empty where not exact."""
        rules = self._exactness.rules
        if rules is None:
            return ""
        capability = torch.backends.cpu.get_cpu_capability()
        return (
            f"exact;torch {torch.__version__};{self.model.module.device.type};{capability};"
            f"{torch.get_num_threads()} threads;{kernel_settings()};{rules.fingerprint}"
        )

    def copy(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of block `src` to block `dst`."""
        self.kv.copy(src, dst, num_tokens)

    def step(self, parts: Sequence[Part]) -> Tensor:
        """Compute the new tokens of all parts in one forward and write their KV.

        Returns logits [those that the parts want, vocab], float32, in the order of `parts`.
        """
        return forward(self.model, self._exactness.rules, self.kv, parts)


@torch.inference_mode()
def forward(
    model: LoadedModel, rules: ExactRules | None, kv: PagedKV, parts: Sequence[Part]
) -> Tensor:
    """One packed forward on a pool, under the rules of exact mode if there are any."""
    module = model.module
    step = Packed(kv, parts, rules.attention if rules else ANY_RULES)
    ordered = [parts[i] for i in step.order]
    token_ids = np.fromiter(chain.from_iterable(part.token_ids for part in ordered), np.int64)
    positions = np.concatenate([np.arange(part.start, part.end) for part in ordered])
    last_rows = np.cumsum([len(part.token_ids) for part in ordered]) - 1
    row_of = dict(zip(step.order, last_rows, strict=True))
    wanted = [
        row
        for i, part in enumerate(parts)
        for row in range(row_of[i] + 1 - part.num_logits, row_of[i] + 1)
    ]
    row_exact_layers(module).rules = rules
    output = module(
        input_ids=torch.from_numpy(token_ids).to(module.device)[None],
        position_ids=torch.from_numpy(positions).to(module.device)[None],
        use_cache=True,
        logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=module.device),
        paged_step=step,
        **{cache_argument(module): PagedCache(kv, step.slots)},
    )
    logits: Tensor = output.logits[0].float()
    return logits
