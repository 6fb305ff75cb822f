"""One sample of a request on its way through the engine: its tokens, lease and text."""

from collections.abc import Collection

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from foreword.core.block import Chain
from foreword.core.cache import Lease
from foreword.core.request import FinishReason, Output, Request, TokenLogprob
from foreword.engine.sampler import adjusted, sample, token_logprob, uniform


class Sequence:
    """`chain` holds the prompt, then what was sampled. The newest sampled token has no KV yet."""

    def __init__(
        self, request: Request, index: int, chain: Chain, seed: int, text: "TextStream"
    ) -> None:
        self.request = request
        self.index = index
        self.chain = chain
        self.seed = seed
        self.text = text
        self.arrival = 0  # order of admission; the youngest is preempted first
        self.lease: Lease | None = None
        self.siblings: list[Sequence] = []  # samples that start when the prompt is computed
        self.num_cached_tokens: int | None = None  # of the prompt, at the first admission
        self.finish_reason: FinishReason | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.chain) - len(self.request.prompt)

    @property
    def num_uncomputed(self) -> int:
        assert self.lease is not None
        return len(self.chain) - self.lease.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_sampled > 0 and self.num_uncomputed == 1

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
            () if may_stop or params.ignore_eos else eos_token_ids,
        )
        token_id = sample(chosen_from, params, uniform(self.seed, self.index, len(self.chain)))
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
        )


class TextStream:
    """Turns a sample's tokens into text pieces, holding back incomplete characters and what may
    become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._held = ""
        self._token_ids: list[int] = []
        self._num_characters = 0  # of the pieces of `_token_ids`
        self.num_characters = 0  # of all text so far, sent or held back

    def push(self, token_id: int, may_stop: bool = True) -> tuple[str, bool]:
        """The text that may be sent now, and whether a stop string was met (it is left out). What
        comes before stopping is allowed is no part of a stop string."""
        piece = self._piece(token_id)
        self.num_characters += len(piece)
        if not may_stop:
            return piece, False
        self._held += piece
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return text, True
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        at = len(self._held) - keep
        text, self._held = self._held[:at], self._held[at:]
        return text, False

    def flush(self) -> str:
        """The rest, at the end: no stop string came, and incomplete characters stay incomplete."""
        return self._held + self._incomplete()

    def _piece(self, token_id: int) -> str:
        before = ""
        try:
            piece = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # noqa: BLE001
            # The library has no narrower error for what it refuses: a token after which the text
            # of the tokens before it would read differently, as with stray bytes of a character.
            before = self._incomplete()
            self._stream = DecodeStream(skip_special_tokens=True)
            self._token_ids, self._num_characters = [], 0
            piece = self._stream.step(self._tokenizer, token_id) or ""
        self._token_ids.append(token_id)
        self._num_characters += len(piece)
        return before + piece

    def _incomplete(self) -> str:
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        return whole[self._num_characters :]


def _overlap(text: str, stop: str) -> int:
    """How many last characters of `text` are first characters of `stop`."""
    return next(
        (
            size
            for size in range(min(len(text), len(stop) - 1), 0, -1)
            if stop[:size] == text[-size:]
        ),
        0,
    )
