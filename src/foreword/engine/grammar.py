"""Answers that must follow a grammar: which tokens may come next. llguidance does the work."""

from collections import OrderedDict
from threading import Lock

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foreword.core.errors import RequestError

try:
    import llguidance
    import llguidance.hf
except ModuleNotFoundError:
    _installed = False
else:
    _installed = True

_MAX_KEPT = 32  # compiled grammars; one is used by many requests, and compiling may take a second


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, matcher: "llguidance.LLMatcher") -> None:
        self._matcher = matcher

    def restrict(self, logits: Tensor) -> Tensor:
        """The logits [vocab], minus infinity where a token cannot come next."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()
        mask = allowed[: len(logits)].bool().to(logits.device)
        return logits.masked_fill(~mask, float("-inf"))

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class Grammars:
    """The grammars of one model's tokenizer, compiled when first asked for. Thread-safe."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_token_id: int | None
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, eos_token_id
        self._known: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._converted: llguidance.LLTokenizer | None = None

    def matcher(self, grammar: str) -> Matcher:
        """At the start of `grammar`. Raises RequestError for one that cannot be followed."""
        with self._lock:
            known = self._known.get(grammar)
        if known is None:  # without the lock: it may take a second, and the engine asks here too
            known = self._compiled(grammar)
        with self._lock:
            self._known[grammar] = known
            self._known.move_to_end(grammar)
            if len(self._known) > _MAX_KEPT:
                self._known.popitem(last=False)
            return Matcher(known.deep_copy())

    def _compiled(self, grammar: str) -> "llguidance.LLMatcher":
        if not _installed:
            raise RequestError(
                "Structured answers need llguidance on the server: pip install "
                "'foreword[structured]'.",
                "response_format",
            )
        with self._lock:
            if self._converted is None:
                self._converted = llguidance.hf.from_tokenizer(
                    self._tokenizer, self._vocab_size, self._eos
                )
        compiled = llguidance.LLMatcher(
            self._converted, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0
        )
        if compiled.is_error():
            reason = compiled.get_error().strip().split("\n")[0][:300]
            raise RequestError(f"This format cannot be followed: {reason}", "response_format")
        return compiled
