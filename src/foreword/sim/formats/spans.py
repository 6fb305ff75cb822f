"""OpenTelemetry's spans of generative AI: OTLP JSON, or one span an object or a line.

Attributes are those of the GenAI semantic conventions (status: development):
`gen_ai.input.messages` and `gen_ai.system_instructions` with `parts`, `gen_ai.tool.definitions`,
`gen_ai.output.messages`, `gen_ai.usage.input_tokens` (cached ones among them),
`gen_ai.usage.cache_read.input_tokens`, `gen_ai.conversation.id`. Older names are read too:
`gen_ai.usage.prompt_tokens`, `gen_ai.usage.cache_read_input_tokens`, `gen_ai_...` with underscores,
`gen_ai.prompt.0.content`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from foreword.sim.formats.chat import message_segments, prompt_segments
from foreword.sim.formats.fields import count, first_of, mapping, moment, objects, prompt_tokens
from foreword.sim.formats.reading import Format, Lengths, Reader, Reading, Said
from foreword.sim.pieces import Bad
from foreword.sim.trace import Record

_STARTS = ("startTimeUnixNano", "start_time_unix_nano", "startTime", "start_time", "timestamp")
_INPUT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_CACHED = (
    *("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens"),
    *("gen_ai.usage.input_cached_tokens", "gen_ai.usage.cached_tokens"),
)
_SESSIONS = ("gen_ai.conversation.id", "session.id", "gen_ai.session.id")
_MODELS = ("gen_ai.request.model", "gen_ai.response.model")
_FIRST_TOKEN = ("gen_ai.server.time_to_first_token", "gen_ai.response.time_to_first_chunk")
_CALLS = ("chat", "text_completion", "generate_content", "completion")
_INDEXED = re.compile(r"gen_ai\.(prompt|completion)\.(\d+)\.(role|content)")


class Spans(Reader):
    """Reads spans, or OTLP's lists of them."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        for span in _spans(item):
            attributes = {_name(key): value for key, value in span.attributes.items()}
            if _is_call(attributes):
                yield self._call(span.fields, attributes)

    def _call(self, span: Mapping[str, Any], attributes: dict[str, Any]) -> Record | Lengths:
        arrival_s = moment(span, *_STARTS)
        if arrival_s is None:
            raise Bad("a span has no start time")
        for name in (*_INPUT_TOKENS, *_OUTPUT_TOKENS, *_CACHED):
            if isinstance(attributes.get(name), str) and attributes[name].isdigit():
                attributes[name] = int(attributes[name])  # OTLP writes whole numbers as strings
        session = str(first_of(attributes, *_SESSIONS) or _trace_id(span))
        num_output_tokens = count(attributes, *_OUTPUT_TOKENS, default=0)
        messages = _messages(attributes, "input", "prompt")
        if not messages:
            num_tokens = prompt_tokens(attributes, *_INPUT_TOKENS)
            return Lengths(num_tokens, arrival_s, num_output_tokens, session)
        body = {
            "tools": _listed(attributes, "gen_ai.tool.definitions"),
            "system": [_part(part) for part in _listed(attributes, "gen_ai.system_instructions")],
            "messages": messages,
        }
        answers = _messages(attributes, "output", "completion")
        answer = message_segments(answers[0])[1:] if answers else []
        num_tokens = count(attributes, *_INPUT_TOKENS, default=0)
        cached = count(attributes, *_CACHED) if first_of(attributes, *_CACHED) is not None else None
        if cached is not None and cached > num_tokens:
            cached, num_tokens = None, 0  # some count as Anthropic does, the cached ones beside
            self._reading.notes["{n} spans count more cached than input tokens: left out"] += 1
        said = Said(
            arrival_s,
            session,
            str(first_of(attributes, *_MODELS) or ""),
            num_tokens or None,
            num_output_tokens,
            cached,
            moment(attributes, *_FIRST_TOKEN),
        )
        return self._reading.text_record(prompt_segments(body), answer, said)


def _is_call(attributes: Mapping[str, Any]) -> bool:
    """Is a span a model's call, rather than a tool's, an agent's or of anything else?"""
    call = attributes.get("gen_ai.operation.name")
    if call is not None:
        return call in _CALLS
    counted = first_of(attributes, *_INPUT_TOKENS) is not None
    return counted or bool(_messages(attributes, "input", "prompt"))


def _trace_id(span: Mapping[str, Any]) -> object:
    """Calls of one trace belong together where no conversation is named."""
    context = span.get("context")
    places = (span, context) if isinstance(context, dict) else (span,)
    return next((found for one in places if (found := first_of(one, "traceId", "trace_id"))), "")


class _Span:
    """A span's own fields, and its attributes by name."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        given = fields.get("attributes")
        if isinstance(given, list):
            pairs = objects(fields, "attributes")
            self.attributes = {str(one.get("key")): _value(one.get("value")) for one in pairs}
        elif given is None:
            self.attributes = dict(fields)  # flat: the attributes are the fields
        else:
            self.attributes = dict(mapping(fields, "attributes"))
        for event in objects(fields, "events"):
            if str(event.get("name")).startswith("gen_ai."):
                self.attributes |= _Span(event).attributes


def _spans(item: Mapping[str, Any]) -> Iterator[_Span]:
    if not _is_otlp(item):
        yield _Span(item)
        return
    for resource in objects(item, "resourceSpans", "resource_spans"):
        for scope in objects(resource, "scopeSpans", "scope_spans"):
            yield from map(_Span, objects(scope, "spans"))


def _is_otlp(item: Mapping[str, Any]) -> bool:
    return "resourceSpans" in item or "resource_spans" in item


def _is_span(item: Mapping[str, Any]) -> bool:
    if _is_otlp(item):
        return True
    flat = any(_name(key).startswith("gen_ai.") for key in item)
    return flat or ("attributes" in item and first_of(item, *_STARTS) is not None)


def _value(value: object) -> object:
    """An attribute's value out of OTLP's wrapping."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    kind, inner = next(iter(value.items()))
    if kind == "arrayValue":
        return [_value(one) for one in objects(mapping(value, kind), "values")]
    if kind == "kvlistValue":
        pairs = objects(mapping(value, kind), "values")
        return {str(one.get("key")): _value(one.get("value")) for one in pairs}
    return int(inner) if kind == "intValue" and str(inner).lstrip("-").isdigit() else inner


def _name(key: str) -> str:
    """An attribute's name in today's spelling: older ones have underscores for dots."""
    if not key.startswith("gen_ai_"):
        return key
    rest = key.removeprefix("gen_ai_")
    for group in ("usage", "request", "response", "conversation", "operation", "tool", "session"):
        if rest.startswith(f"{group}_"):
            return f"gen_ai.{group}.{rest.removeprefix(f'{group}_')}"
    return {
        "input_messages": "gen_ai.input.messages",
        "output_messages": "gen_ai.output.messages",
    }.get(rest, f"gen_ai.{rest}")


def _listed(attributes: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects, also one that is written as JSON text. Raises Bad."""
    found = attributes.get(name)
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise Bad(f"{name} is cut off, or no JSON: {error}") from error
        if isinstance(found, str):
            found = [{"type": "text", "content": found}]
    return objects({name: found or None}, name)


def _messages(attributes: Mapping[str, Any], now: str, before: str) -> list[dict[str, Any]]:
    """The messages of one side, in the form of chat completions. Raises Bad."""
    listed = _listed(attributes, f"gen_ai.{now}.messages")
    if not listed and str(attributes.get(f"gen_ai.{before}")).startswith("["):
        listed = _listed(attributes, f"gen_ai.{before}")
    if listed:
        return [
            {**message, "content": [_part(part) for part in objects(message, "parts")]}
            if "parts" in message
            else message
            for message in listed
        ]
    numbered: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        found = _INDEXED.fullmatch(key)
        if found and found[1] == before:
            numbered.setdefault(int(found[2]), {"role": "user"})[found[3]] = value
    return [numbered[index] for index in sorted(numbered)]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part in the form of Anthropic's messages."""
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": part.get("content", part.get("text"))}
    if kind == "tool_call":
        call = {"id": part.get("id"), "name": part.get("name"), "input": part.get("arguments")}
        return {"type": "tool_use", **call}
    if kind == "tool_call_response":
        result = first_of(part, "response", "result")
        shown = result if isinstance(result, str) else json.dumps(result)
        return {"type": "tool_result", "tool_use_id": part.get("id"), "content": shown}
    if kind in ("reasoning", "thinking"):
        return {"type": "thinking", "thinking": str(part.get("content", ""))}
    return dict(part)


FORMATS = (Format("otel", _is_span, Spans),)
