"""What crosses between a server and whatever generates: Request, Output, Engine."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from foreword.core.errors import RequestError
from foreword.core.stats import EngineStats
from foreword.core.worth import Value

FinishReason = Literal["stop", "length"]
# How a model writes a call: as JSON between <tool_call> and </tool_call>, or as JSON and no more.
ToolStyle = Literal["tagged", "bare"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose each next token. The field meanings are OpenAI's; those that it does not have
    mean what they do in vLLM."""

    max_tokens: int
    min_tokens: int = 0  # before these no end of sequence comes and no stop string counts
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0  # of the most likely token's probability; what has less is left out
    presence_penalty: float = 0.0  # off the logit of a token that was sampled already
    frequency_penalty: float = 0.0  # the same, for each time
    repetition_penalty: float = 1.0  # divides the logit of a token of the prompt or sampled already
    seed: int | None = None  # None: the engine draws one
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # alternatives to report per token; 0 reports the token alone
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, which computes them all
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    grammar: str = ""  # what the text must be, in llguidance's Lark; it says where the end is


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says of how its KV is to be kept. It changes no answer."""

    prompt_cache_key: str = ""  # a name for what its prompt starts with, such as a document's
    ttl_s: float | None = None  # how long after its last use it may be wanted again
    num_stable_tokens: int | None = None  # leading ones that others will have too, and no more
    max_offload_tokens: int | None = None  # only so many leading ones may go below the device
    cacheable: bool = True  # False: nobody else reuses what is computed for it


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, `n` samples of its continuation. `cache_salt` separates tenants' caches."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    cache_salt: str = ""
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token under the model (before temperature), with the most
    likely alternatives as (token id, logprob), best first. `text_offset` is where the token starts
    in its sample's text, in characters; parts of one character start where it does."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """What one sample gained in one step. `text` may lag behind `token_ids` while bytes of a
    character or a possible stop string are incomplete; the last Output flushes it."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens of the request that were not computed
    # Of the prompt's tokens from the second on; in the first output of the first sample.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a server may say about the served model."""

    name: str
    max_model_len: int  # tokens, prompt and continuation together
    vocab_size: int
    tool_style: ToolStyle | None = None  # None: its chat template knows no tools


class Engine(Protocol):
    """Everything that serves: the torch engine, a router, an echo engine in tests."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def is_serving(self) -> bool:
        """Whether new requests are taken: not while it drains, nor after it failed."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Counts since start. Cheap, and may be read from any thread."""
        ...

    @property
    def value(self) -> Value:
        """What its cache is worth."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, after what the model's tokenizer starts every text with. Blocking:
        call it off the event loop."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a rendered chat, ready for the assistant's turn. Blocking.

        `tools` are for templates that know them (`card.tool_style`). Raises RequestError when the
        model's template refuses the messages."""
        ...

    def check_grammar(self, grammar: str) -> None:
        """Raises RequestError, which says why, for a grammar that cannot be followed. Blocking."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Output]:
        """Outputs of all samples as they come; each sample's last one has a finish_reason.

        Closing the iterator cancels the request. Raises RequestError for a request that can
        never fit, EngineBusy when too many wait, EngineStopped when the engine is draining or has
        failed, RequestFailed when the engine goes on but this request cannot."""
        ...

    async def clear_cache(self) -> bool:
        """Forget all known prefixes. False, and nothing is forgotten, while any request runs.
        Raises EngineStopped."""
        ...


def check_request(request: Request, card: ModelCard) -> None:
    """Raises RequestError for one that could never be served."""
    total = len(request.prompt) + request.sampling.max_tokens
    if not request.prompt:
        raise RequestError("The prompt is empty: send at least one token.", "prompt")
    if min(request.prompt) < 0 or max(request.prompt) >= card.vocab_size:
        raise RequestError(f"Token ids must lie from 0 to {card.vocab_size - 1}.", "prompt")
    if total > card.max_model_len:
        raise RequestError(
            f"The prompt has {len(request.prompt)} tokens and max_tokens is "
            f"{request.sampling.max_tokens}: together {total}, over the limit of "
            f"{card.max_model_len}.",
            "max_tokens",
        )
