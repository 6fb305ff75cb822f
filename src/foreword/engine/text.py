"""Text to token ids, as the model's authors do it, and token ids back to text as they come."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from foreword.core.errors import RequestError
from foreword.engine.model import LoadedModel


class Text:
    """A model's tokenizer and chat template, for prompts of at most `max_model_len` tokens."""

    def __init__(self, model: LoadedModel, max_model_len: int) -> None:
        self._model, self._max_model_len = model, max_model_len

    def encode(self, text: str) -> list[int]:
        return self._token_ids(text, "prompt", add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        tokenizer = self._model.tokenizer
        if tokenizer.chat_template is None:
            raise RequestError(
                "This model has no chat template: send a text to /v1/completions.", "messages"
            )
        try:
            text = str(
                tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {error}", "messages"
            ) from error
        return self._token_ids(text, "messages", add_special_tokens=False)  # the template's

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._model.tokenizer.decode(list(token_ids)))

    def _token_ids(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        limit, longest = self._max_model_len, self._model.longest_token
        if len(text) > limit * longest:  # known without tokenising it, which would take long
            raise RequestError(
                f"The prompt has {len(text)} characters: over the limit of {limit} tokens, none of "
                f"which has more than {longest}.",
                param,
            )
        return self._model.token_ids(text, add_special_tokens)


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
