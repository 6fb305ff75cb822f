"""What APIs are asked: bodies of OpenAI's chat completions, completions and responses and of
Anthropic's messages, one a line, or in a column of a CSV file.

A line is the body itself, or has it under one of `_BODIES`, as an object or as JSON text (OpenAI's
batch files: `body`), and what came back under one of `_ANSWERS`. aiperf's rows with `messages`,
`text_input` or `payload` in Mooncake's form are read here too; their `timestamp` and `delay` are in
ms.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from foreword.sim.formats.chat import answer_segments, prompt_segments
from foreword.sim.formats.fields import count, first_of, mapping, moment, objects, text
from foreword.sim.formats.reading import Format, Lengths, Reader, Reading, Said
from foreword.sim.formats.rows import RowClock
from foreword.sim.pieces import Bad, parsed
from foreword.sim.trace import Record

_BODIES = ("request_json", "request_body", "request", "body", "payload")
_ANSWERS = ("response_json", "response_body", "response")
_TIMES = (
    *("timestamp_ms", "timestamp", "time", "ts", "start_time", "startTime", "created_at"),
    *("created", "request_time", "arrival_s"),
)
_SESSIONS = (
    *("session_id", "prompt_cache_key", "conversation_id", "thread_id", "trace_id", "user_id"),
    *("safety_identifier", "user"),
)


def is_body(item: Mapping[str, Any]) -> bool:
    return "messages" in item or "prompt" in item or {"input", "model"} <= item.keys()


def session_of(*items: Mapping[str, Any]) -> str:
    """The first name that says what belongs together, in any of these or their metadata."""
    for item in items:
        metadata = item.get("metadata")
        places = (item, metadata) if isinstance(metadata, dict) else (item,)
        for name in _SESSIONS:
            for place in places:
                if place.get(name):
                    return text(place, name)
        conversation = item.get("conversation")
        if isinstance(conversation, dict):
            return text(conversation, "id")
        if conversation:
            return text(item, "conversation")
    return ""


def tenant_of(body: Mapping[str, Any]) -> str:
    """Models share no KV, and a cache_salt keeps tenants apart."""
    return f"{text(body, 'cache_salt')} {text(body, 'model')}".strip()


def usage_of(answer: Mapping[str, Any]) -> dict[str, int | None]:
    """What an answer's `usage` says, in the words of Said. OpenAI counts cached tokens among the
    input, Anthropic beside it. Raises Bad."""
    usage = mapping(answer, "usage")
    if not usage:
        return {}
    details = mapping(usage, "prompt_tokens_details", "input_tokens_details")
    num_tokens = count(usage, "prompt_tokens", "input_tokens")
    read = first_of(usage, "cache_read_input_tokens")
    if "prompt_tokens" not in usage and (
        read is not None or "cache_creation_input_tokens" in usage
    ):
        cached: int | None = count(usage, "cache_read_input_tokens", default=0)
        num_tokens += (cached or 0) + count(usage, "cache_creation_input_tokens", default=0)
    elif first_of(details, "cached_tokens") is not None:
        cached = count(details, "cached_tokens")
    else:
        cached = None if read is None else count(usage, "cache_read_input_tokens")
    return {
        "num_tokens": num_tokens,
        "num_cached_tokens": cached,
        "num_output_tokens": count(usage, "completion_tokens", "output_tokens", default=0),
    }


def body_records(
    reading: Reading, body: Mapping[str, Any], answer: Mapping[str, Any], said: Said
) -> Iterator[Record]:
    """The requests that a body is: one, or one for each of a completion's prompts. Raises Bad."""
    if body.get("previous_response_id"):
        raise Bad("it goes on from a previous response, which the server keeps")
    if any(body.get(name) is not None for name in ("messages", "input")):
        yield reading.text_record(prompt_segments(body), answer_segments(answer), said)
        return
    prompt = body.get("prompt")
    if not prompt:
        raise Bad("its prompt is empty")
    prompts: Sequence[object] = [prompt]
    if isinstance(prompt, list) and not any(type(one) is int for one in prompt):
        prompts = prompt
    texts = [choice.get("text") for choice in objects(answer, "choices")]
    for index, one in enumerate(prompts):
        if isinstance(one, str):
            found = texts[index] if len(texts) == len(prompts) else None
            yield reading.text_record([one], [found] if isinstance(found, str) else [], said)
        else:
            ids = reading.ids.numbers(one)
            yield reading.token_record(ids, np.empty(0, np.uint32), said)


class Bodies(Reader):
    """Reads bodies, with or without what a log adds to them."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        body = item if is_body(item) else opened(item, *_BODIES)
        answer = opened(item, *_ANSWERS)
        if not body:
            raise Bad(f"there is no request in it, under {', '.join(_BODIES)}")
        arrival_s = moment(item, *_TIMES)
        if arrival_s is None:
            arrival_s = 0.0
            self._reading.notes["{n} requests have no time: they come at once, in their order"] += 1
        session = session_of(body, item)
        said = Said(arrival_s, session, tenant_of(body), **usage_of(answer))
        yield from body_records(self._reading, body, answer, said)


class Replayed(Reader):
    """Reads rows in Mooncake's form that have text in place of ids."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._clock = RowClock(reading)

    def read(self, item: Mapping[str, Any]) -> Iterator[Record | Lengths]:
        if item.get("message_mode") == "delta":
            raise Bad("message_mode is delta: later prompts hold answers that are not in the trace")
        session = text(item, "session_id", "session")
        arrival_s = self._clock.arrival_s(item, session)
        num_output_tokens = count(item, "output_length", default=0)
        body = mapping(item, "payload") or item
        said = Said(arrival_s, session, tenant_of(body), num_output_tokens=num_output_tokens)
        if isinstance(item.get("text_input"), str):
            yield self._reading.text_record([item["text_input"]], [], said)
        else:
            yield from body_records(self._reading, body, {}, said)


_OF_REPLAYED = {"output_length", "delay", "message_mode", "text_input"}


def opened(item: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """An object, also one written as JSON text; an empty one where there is none. Raises Bad."""
    found = first_of(item, *names)
    if isinstance(found, str):
        return parsed(found.encode("utf-8", "surrogatepass")) if found.strip() else {}
    return mapping(item, *names)


FORMATS = (
    Format(
        "mooncake-text",
        lambda item: (
            bool(item.keys() & _OF_REPLAYED)
            and bool(item.keys() & {"messages", "text_input", "payload"})
        ),
        Replayed,
    ),
    Format(
        "bodies",
        lambda item: is_body(item) or any(item.get(name) for name in _BODIES),
        Bodies,
        is_header=lambda names: any(name in names for name in (*_BODIES, "prompt")),
    ),
)
