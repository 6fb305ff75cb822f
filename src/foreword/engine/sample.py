"""Sample: a sequence as the engine runs it, which draws its tokens and writes its text."""

import os
from collections.abc import Collection

from tokenizers import Tokenizer
from torch import Tensor

from foreword.core.block import Chain
from foreword.core.request import FinishReason, Output, Request, TokenLogprob
from foreword.core.sequence import Sequence
from foreword.engine.attention import Part
from foreword.engine.grammar import Grammars, Matcher
from foreword.engine.sampler import adjusted, sample, token_logprob, uniform
from foreword.engine.text import TextStream


class Sample(Sequence):
    """A sequence of the scheduler, with how its tokens are drawn and what text they make."""

    def __init__(
        self,
        request: Request,
        index: int,
        chain: Chain,
        seed: int,
        text: TextStream,
        matcher: Matcher | None = None,
    ) -> None:
        """`chain` holds the request's prompt."""
        wants_prompt = request.sampling.prompt_logprobs is not None
        super().__init__(chain, index, wants_prompt=wants_prompt)
        self.hints = request.hints
        self.request = request
        self.seed = seed
        self.text = text
        self._matcher = matcher
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprob] = []

    def part(self, start: int, num_tokens: int) -> Part:
        """Tokens to compute from place `start` on, as a part of a step."""
        assert self.lease is not None
        stop = start + num_tokens
        num_logits = num_tokens if self.reports_prompt else int(stop == len(self.chain))
        return Part(self.lease.block_ids, start, self.chain.token_ids[start:stop], num_logits)

    def take_prompt(self, logits: Tensor, start: int) -> None:
        """Logits [tokens, vocab] of the prompt's tokens from position `start` on, each of which
        predicts the next one."""
        num_top = self.request.sampling.prompt_logprobs or 0
        del self.prompt_logprobs[start:]  # of an admission before a preemption
        following = self.request.prompt[start + 1 : start + 1 + len(logits)]
        for row, token_id in zip(logits, following, strict=False):  # the last one's is sampled
            self.prompt_logprobs.append(token_logprob(row, token_id, num_top))

    def advance(self, logits: Tensor, eos_token_ids: Collection[int]) -> Output:
        """Choose the next token from the model's logits [vocab], and say what it adds. Sets
        `finish_reason` when it is the last."""
        params = self.request.sampling
        num_prompt = len(self.request.prompt)
        may_stop = self.num_sampled >= params.min_tokens
        chosen_from = adjusted(
            logits,
            params,
            self.request.prompt,
            self.chain.token_ids[num_prompt:],
            () if may_stop or params.ignore_eos or self._matcher is not None else eos_token_ids,
        )
        if self._matcher is not None:
            chosen_from = self._matcher.restrict(chosen_from)
        token_id = sample(chosen_from, params, uniform(self.seed, self.index, len(self.chain)))
        if self._matcher is not None:
            self._matcher.accept(token_id)
        self.chain.extend((token_id,))
        offset = self.text.num_characters
        ends = token_id in eos_token_ids and not params.ignore_eos
        text, met = ("", False) if ends else self.text.push(token_id, may_stop)
        if ends or met:
            self.finish_reason = "stop"
        elif self.num_sampled >= params.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and not met:
            text += self.text.flush()
        logprobs: tuple[TokenLogprob, ...] = ()
        if params.logprobs is not None:
            logprobs = (token_logprob(logits, token_id, params.logprobs, offset),)
        return Output(
            self.index,
            (token_id,),
            text,
            logprobs,
            self.finish_reason,
            self.num_cached_tokens or 0,
            tuple(self.prompt_logprobs) if self.num_sampled == 1 else (),
        )


def samples_of(
    request: Request, chain: Chain, tokenizer: Tokenizer, grammars: Grammars
) -> list[Sample]:
    """All samples of a request, whose prompt `chain` holds."""
    seed, grammar = request.sampling.seed, request.sampling.grammar
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "big")
    # One more for all others: of 128 samples that wait, each with its own, few run at a time.
    shared = chain.copy() if request.n > 1 else chain
    return [
        Sample(
            request,
            index,
            shared if index else chain,
            seed,
            TextStream(tokenizer, request.sampling.stop),
            grammars.matcher(grammar) if grammar else None,
        )
        for index in range(request.n)
    ]
