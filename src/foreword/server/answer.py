"""Outputs in OpenAI's shapes: chunks of a stream, or one whole answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from foreword.core.request import Output, TokenLogprob
from foreword.server.openai import Call
from foreword.server.tools import ToolCalls

LOGPROB_MIN = -9999.0  # OpenAI's word for "very unlikely"; JSON has no minus infinity
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for part of a character

Decode = Callable[[tuple[int, ...]], str]


@dataclass(slots=True)
class Sample:
    """What has come of one sample."""

    parser: ToolCalls | None  # None: no tools, all is text
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # in the shape of its kind
    finish_reason: str | None = None


class Answer:
    """One call's answer as it grows: feed it each Output once, by `chunks` or by `add`."""

    def __init__(self, call: Call, decode: Decode) -> None:
        self._call = call
        self._is_chat = call.kind == "chat"
        self._decode = decode
        self._created = int(time.time())
        self._samples: dict[int, Sample] = {}
        self._num_completion = 0
        self._num_cached: dict[int, int] = {}  # by request
        self._params = call.requests[0].sampling
        self._prompt_logprobs: dict[int, list[dict[str, Any] | None]] = {}  # by request

    def add(self, output: Output) -> tuple[dict[str, Any], str, list[dict[str, Any]]]:
        """Take one output in; returns its choice without text, then new text and new calls."""
        sample = self._sample(output.index)
        self._num_completion += len(output.token_ids)
        # Later samples reuse the prompt that the first computed: the least is the request's own.
        number = output.index // self._call.requests[0].n
        cached = self._num_cached.get(number, output.num_cached_tokens)
        self._num_cached[number] = min(cached, output.num_cached_tokens)
        if self._params.prompt_logprobs is not None and number not in self._prompt_logprobs:
            ranked = [self._by_token(logprob) for logprob in output.prompt_logprobs]
            self._prompt_logprobs[number] = [None, *ranked]  # nothing predicts the first token
        sample.finish_reason = output.finish_reason
        text, calls = output.text, list[dict[str, Any]]()
        if sample.parser is not None:
            text, calls = sample.parser.push(output.text)
            if output.finish_reason is not None:
                last_text, last_calls = sample.parser.flush()
                text, calls = text + last_text, calls + last_calls
                if sample.parser.num_calls and output.finish_reason == "stop":
                    sample.finish_reason = "tool_calls"
        sample.text += text
        sample.calls += calls
        logprobs = None
        if self._params.logprobs is not None:
            shape = self._chat_logprob if self._is_chat else self._text_logprob
            new = [shape(logprob) for logprob in output.logprobs]
            sample.logprobs += new
            logprobs = self._logprobs(new)
        choice = {"index": output.index, "logprobs": logprobs}
        return {**choice, "finish_reason": sample.finish_reason}, text, calls

    def _sample(self, index: int) -> Sample:
        if index not in self._samples:
            names, style = self._call.tools.names, self._call.tool_style
            self._samples[index] = Sample(ToolCalls(names, style) if names else None)
        return self._samples[index]

    def chunks(self, output: Output) -> list[dict[str, Any]]:
        """The stream events that an output makes: its own, and before a chat's first the role."""
        starts = self._is_chat and output.index not in self._samples
        choice, text, calls = self.add(output)
        if not self._is_chat:
            return [self._event({**choice, "text": text})]
        made = []
        if starts:
            role = {"role": "assistant", "content": ""}
            made.append({**choice, "delta": role, "logprobs": None, "finish_reason": None})
        delta: dict[str, Any] = {"content": text} if text or not calls else {}
        if calls:
            first = len(self._sample(output.index).calls) - len(calls)
            numbered = [{"index": first + at, **call} for at, call in enumerate(calls)]
            delta["tool_calls"] = numbered
        made.append({**choice, "delta": delta})
        return [self._event(choice) for choice in made]

    def _event(self, *choices: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._call.include_usage else {}
        return {**self._head(".chunk"), "choices": list(choices), **usage}

    def usage_event(self) -> dict[str, Any]:
        """The last event of a stream with include_usage."""
        return {**self._event(), "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, sample in sorted(self._samples.items()):
            asked = self._params.logprobs is not None
            message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
            if sample.calls:
                message |= {"content": sample.text or None, "tool_calls": sample.calls}
            choices.append(
                {
                    "index": index,
                    **({"message": message} if self._is_chat else {"text": sample.text}),
                    "logprobs": self._logprobs(sample.logprobs) if asked else None,
                    "finish_reason": sample.finish_reason,
                }
            )
            if self._prompt_logprobs:
                number = index // self._call.requests[0].n
                choices[-1]["prompt_logprobs"] = self._prompt_logprobs[number]
        return {**self._head(""), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        num_prompt = sum(len(request.prompt) for request in self._call.requests)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_completion,
            "total_tokens": num_prompt + self._num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }

    def _head(self, suffix: str) -> dict[str, Any]:
        return {
            "id": self._call.call_id,
            # A text stream's events are called as its whole answer.
            "object": f"chat.completion{suffix}" if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._call.model,
        }

    def _logprobs(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        if self._is_chat:
            return {"content": items, "refusal": None}
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [item[name] for item in items] for name in names}

    def _chat_logprob(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, value) for token_id, value in logprob.top]
        return {**self._token(logprob.token_id, logprob.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._decode((token_id,))
        # The bytes of a part of a character cannot be told from its text.
        octets = None if INCOMPLETE in text else list(text.encode())
        return {"token": text, "bytes": octets, "logprob": max(logprob, LOGPROB_MIN)}

    def _by_token(self, logprob: TokenLogprob) -> dict[str, Any]:
        """One prompt token and its alternatives in vLLM's shape."""
        values = [*logprob.top, (logprob.token_id, logprob.logprob)]
        return {
            str(token_id): {
                "logprob": max(value, LOGPROB_MIN),
                "decoded_token": self._decode((token_id,)),
            }
            for token_id, value in values
        }

    def _text_logprob(self, logprob: TokenLogprob) -> dict[str, Any]:
        token = self._decode((logprob.token_id,))
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self._decode((token_id,)), max(value, LOGPROB_MIN))
        return {
            "tokens": token,
            "token_logprobs": max(logprob.logprob, LOGPROB_MIN),
            "top_logprobs": top,
            "text_offset": logprob.text_offset,
        }
