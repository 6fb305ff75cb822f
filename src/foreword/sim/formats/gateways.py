"""LiteLLM's StandardLoggingPayload, one a line (docs.litellm.ai, proxy/logging_spec).

`messages`, `response`, `model_parameters` (with `tools`), `startTime`, `endTime` and
`completionStartTime` in seconds, `prompt_tokens`, `completion_tokens`, `trace_id`, `model`.
`cache_hit` is a hit of the gateway's own cache of answers: no model saw that request.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from foreword.sim.formats.bodies import body_records, session_of, usage_of
from foreword.sim.formats.fields import count, mapping, moment, prompt_tokens, text
from foreword.sim.formats.reading import Format, Lengths, Reader, Reading, Said
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record

_OF_PAYLOADS = {"startTime", "endTime", "call_type"}
_CALLS = {"completion", "text_completion", "responses", "anthropic_messages", "generate_content"}


class LiteLLM(Reader):
    """Reads one logged call at a time."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        unseen = self._unseen(item)
        if unseen:
            self._reading.notes[f"{{n}} calls are left out: {unseen}"] += 1
            return
        arrival_s = moment(item, "startTime")
        if arrival_s is None:
            raise Bad("there is no startTime")
        answer = item.get("response")
        answer = answer if isinstance(answer, dict) else {}
        first_s = moment(item, "completionStartTime")
        streamed = item.get("stream") is True and first_s is not None
        num_output_tokens = count(item, "completion_tokens", default=0)
        session = text(item, "trace_id") or session_of(item)
        messages = item.get("messages")
        if not messages:
            num_tokens = prompt_tokens(item, "prompt_tokens")
            yield Lengths(num_tokens, arrival_s, num_output_tokens, session)
            return
        usage = usage_of(answer)
        said = Said(
            arrival_s,
            session,
            text(item, "model"),
            count(item, "prompt_tokens", default=0) or usage.get("num_tokens"),
            num_output_tokens,
            usage.get("num_cached_tokens"),
            max(0.0, (first_s or 0.0) - arrival_s) if streamed else None,
        )
        body = dict(mapping(item, "model_parameters"))
        if text(item, "call_type").endswith("responses"):
            body["input"] = messages
        else:
            body["prompt" if isinstance(messages, str) else "messages"] = messages
        yield from body_records(self._reading, body, answer, said)

    def _unseen(self, item: Mapping[str, Any]) -> str:
        """Why no model read this prompt; "" where one did."""
        if item.get("cache_hit") is True:
            return "answered from the gateway's own cache"
        if item.get("status") == "failure":
            return "they failed"
        call = text(item, "call_type")
        return "" if {call, call.removeprefix("a")} & _CALLS else f"of the kind {call}"


FORMATS = (Format("litellm", lambda item: item.keys() >= _OF_PAYLOADS, LiteLLM),)
