"""EchoEngine: an Engine without a model. It answers with its prompt, byte by byte."""

import asyncio
import codecs
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import cycle, islice, takewhile
from typing import Any

from foreword.core.errors import EngineBusy, EngineStopped, RequestError
from foreword.core.ghost import Outlook
from foreword.core.request import (
    FinishReason,
    ModelCard,
    Output,
    Request,
    SamplingParams,
    TokenLogprob,
)
from foreword.core.stats import EngineStats
from foreword.core.worth import Balance, WhatIf

VOCAB_SIZE = 256


class EchoValue:
    """Worth nothing, as long as nobody says otherwise."""

    def __init__(self) -> None:
        nothing = Outlook((0.0,), None)
        self.if_what = WhatIf(0.0, 0.0, 1, 16, ("device",), (0.0,), nothing, ())
        self.balances: dict[str, Balance] = {}  # by tenant

    def what_if(self) -> WhatIf:
        return self.if_what

    def balance(self, tenant: str) -> Balance:
        return self.balances.get(tenant, Balance(0.0, ("device",), (), (), ()))


class EchoEngine:
    """Tokens are UTF-8 bytes. With `ignore_eos` the prompt is echoed over and over. A prompt counts
    as cached as far as an earlier one of its salt goes, except for its last token."""

    def __init__(self, max_model_len: int = 1000, step_s: float = 0.0) -> None:
        self.card = ModelCard("echo", max_model_len, VOCAB_SIZE)
        self.step_s = step_s
        self.requests: list[Request] = []
        self.num_open = 0  # requests that have not ended
        self.cancelled = threading.Event()
        self.stopped = False
        self.busy = False
        self.stats = EngineStats()
        self.value = EchoValue()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def check_grammar(self, grammar: str) -> None:
        if "no grammar" in grammar:
            raise RequestError("This format cannot be followed.", "response_format")

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        self.tools = list(tools)
        if messages[0]["role"] == "assistant":
            raise RequestError("The template wants a user first.", "messages")
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    @property
    def is_serving(self) -> bool:
        return not self.stopped

    async def clear_cache(self) -> bool:
        if self.num_open:
            return False
        self.requests.clear()
        return True

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        if self.busy:
            raise EngineBusy("The queue is full.")
        if not request.prompt:
            raise RequestError("The prompt is empty: send at least one token.", "prompt")
        num_cached = self._num_cached(request)
        self.requests.append(request)
        done = False
        self.num_open += 1
        try:
            samples = [_sample(request, index, num_cached) for index in range(request.n)]
            for outputs in zip(*samples, strict=True):
                for output in outputs:
                    await asyncio.sleep(self.step_s)
                    if self.stopped:
                        raise EngineStopped("The engine stopped.")
                    yield output
            done = True
        finally:
            self.num_open -= 1
            if not done:
                self.cancelled.set()

    def _num_cached(self, request: Request) -> int:
        longest = 0
        for earlier in self.requests:
            if earlier.cache_salt == request.cache_salt:
                pairs = zip(request.prompt, earlier.prompt, strict=False)
                longest = max(longest, sum(1 for _ in takewhile(lambda p: p[0] == p[1], pairs)))
        return min(longest, len(request.prompt) - 1)


def _sample(request: Request, index: int, num_cached: int) -> list[Output]:
    params = request.sampling
    endless = params.ignore_eos
    ids = list(islice(cycle(request.prompt) if endless else request.prompt, params.max_tokens))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    outputs = []
    whole = ""
    for at, token_id in enumerate(ids):
        last = at == len(ids) - 1
        offset = len(whole)
        text = decoder.decode(bytes([token_id]), final=last)
        whole += text
        met = next((stop for stop in params.stop if stop in whole), None)
        cut = endless or len(ids) < len(request.prompt)
        reason: FinishReason = "length" if cut and not met else "stop"
        outputs.append(
            Output(
                index,
                (token_id,),
                "" if met else text,
                _logprobs(params, token_id, offset),
                reason if last or met else None,
                num_cached,
                _prompt_logprobs(request, index) if at == 0 else (),
            )
        )
        if met:
            break
    return outputs


def _prompt_logprobs(request: Request, index: int) -> tuple[TokenLogprob, ...]:
    num_top = request.sampling.prompt_logprobs
    if num_top is None or index:
        return ()
    top = [(0, -0.25), (1, -0.5)][:num_top]
    return tuple(TokenLogprob(token_id, -1.0, tuple(top)) for token_id in request.prompt[1:])


def _logprobs(params: SamplingParams, token_id: int, offset: int) -> tuple[TokenLogprob, ...]:
    if params.logprobs is None:
        return ()
    top = tuple(((token_id + i) % VOCAB_SIZE, -0.5 - i) for i in range(params.logprobs))
    return (TokenLogprob(token_id, -0.5, top, offset),)
