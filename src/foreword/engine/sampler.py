"""Choose the next token. Counter-based: the draw depends on seed, sample and position alone, so
batching, preemption and restarts change nothing."""

from collections.abc import Collection, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from foreword.core.request import SamplingParams, TokenLogprob


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments: 53 bits of BLAKE2b."""
    words = b"".join(value.to_bytes(16, "big", signed=True) for value in (seed, index, position))
    return (int.from_bytes(blake2b(words, digest_size=8).digest(), "big") >> 11) / (1 << 53)


def sample(logits: Tensor, params: SamplingParams, draw: float) -> int:
    """The next token's id. `logits` is float32 [vocab]; `draw` in [0, 1) picks from what
    temperature, then min-p, top-k and top-p leave, in order of probability."""
    if params.temperature == 0:
        return int(logits.argmax())
    # In float64, or a very low temperature overflows.
    scores = (logits.double() - logits.max()) / params.temperature
    probabilities = scores.softmax(-1)
    if params.min_p:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0
    if not params.top_k and params.top_p >= 1:
        return _pick(probabilities, draw)
    ranked, ids = _ranked(probabilities, params.top_k, params.top_p)
    if params.top_p < 1:
        # The smallest set whose share reaches top_p; never empty.
        cumulative = ranked.cumsum(-1)
        total = cumulative[-1] if params.top_k else probabilities.sum()
        ranked = ranked[: int((cumulative < params.top_p * total).sum()) + 1]
    return int(ids[_pick(ranked, draw)])


def adjusted(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    sampled: Sequence[int],
    banned: Collection[int],
) -> Tensor:
    """The logits after penalties, then biases; what is banned cannot come. May be `logits`
    itself, and never changes it."""
    penalised = bool(sampled) and (params.presence_penalty != 0 or params.frequency_penalty != 0)
    if not (penalised or params.repetition_penalty != 1 or params.logit_bias or banned):
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *sampled}), device=logits.device)
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if penalised:
        ids, counts = torch.unique(torch.tensor(sampled, device=logits.device), return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
        logits[ids] += bias.to(logits.device)
    if banned:
        logits[torch.tensor(sorted(banned), device=logits.device)] = float("-inf")
    return logits


def _ranked(probabilities: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The most likely tokens, enough for both limits. A full sort only where it is needed."""
    size = probabilities.numel()
    if top_k:
        return probabilities.topk(min(top_k, size))
    few = probabilities.topk(min(256, size))
    if few.values.sum() >= top_p * probabilities.sum():
        return few
    return probabilities.sort(descending=True, stable=True)


def _pick(probabilities: Tensor, draw: float) -> int:
    """Inverse of the cumulative distribution at `draw`; probabilities need not sum to one."""
    cumulative = probabilities.cumsum(-1)
    place = torch.searchsorted(cumulative, draw * cumulative[-1], right=True)
    return min(int(place), cumulative.numel() - 1)


def token_logprob(
    logits: Tensor, token_id: int, num_top: int, text_offset: int = 0
) -> TokenLogprob:
    """Log-probabilities under the model, before temperature and bias. `logits` is [vocab]."""
    logprobs = logits.log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, ids = logprobs.topk(num_top)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top, text_offset)
