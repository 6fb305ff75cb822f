"""Answers that must follow a grammar: which tokens may come next. llguidance does the work."""

import subprocess
import sys
from collections import OrderedDict
from threading import Lock, Semaphore

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foreword.core.errors import EngineBusy, RequestError

try:
    import llguidance
    import llguidance.hf
except ModuleNotFoundError:
    _installed = False
else:
    _installed = True

_COMPILE_S = 5  # CPU seconds
_COMPILE_BYTES = 2 << 30
_TRIAL = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_COMPILE_S}, {_COMPILE_S}))
resource.setrlimit(resource.RLIMIT_AS, ({_COMPILE_BYTES}, {_COMPILE_BYTES}))
from llguidance import LLMatcher
print(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(sys.stdin.read())))
"""
_compiling = Semaphore(2)  # so that requests without a format always find a thread
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
        _try_elsewhere(grammar)
        compiled = llguidance.LLMatcher(
            self._converted, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0
        )
        if compiled.is_error():
            raise _refusal(compiled.get_error())
        start = compiled.deep_copy()
        start.compute_bitmask()
        if start.is_stopped():
            raise _refusal("nothing can begin an answer")
        return compiled


def _try_elsewhere(grammar: str) -> None:
    """Compile in a process that may use few seconds and bytes, since some schemas would take all
    that there are. Raises RequestError, or EngineBusy where others are compiling."""
    if not _compiling.acquire(blocking=False):
        raise EngineBusy("Other formats are being compiled: this one has to wait.")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _TRIAL],
            input=grammar,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * _COMPILE_S,
        )
    except subprocess.TimeoutExpired:
        done = None
    finally:
        _compiling.release()
    if done is None or done.returncode != 0:
        raise _refusal(
            f"compiling it takes more than {_COMPILE_S} seconds or {_COMPILE_BYTES} bytes"
        )
    if done.stdout.strip():
        raise _refusal(done.stdout)


def _refusal(reason: str) -> RequestError:
    line = reason.strip().split("\n")[0][:300]
    return RequestError(f"This format cannot be followed: {line}", "response_format")
