"""A chat as segments of text: one form for what OpenAI's and Anthropic's APIs are asked.

Tools, then the system prompt, then the messages, each after a mark of its role, as chat templates
write them. What is in a request keeps its order: keys in another order are another prompt to a
server, too. Marks that only steer a cache are left out. Shapes: OpenAI's chat completions and
responses, Anthropic's messages (tool_use, tool_result, thinking), as their references have them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from foreword.sim.formats.fields import objects
from foreword.sim.formats.reading import MEDIA
from foreword.sim.pieces import Bad

_TEXTS = ("text", "input_text", "output_text", "summary_text")
_MEDIA_KINDS = ("image", "audio", "video", "document", "file")
_STEERING = {"cache_control", "prompt_cache_breakpoint"}
_OF_ITEMS = {"id", "status"}  # an answer's items have them, the same items in a request may not
_LEFT_OUT = ("redacted-by-litellm", "[REDACTED]", "<redacted>")


def prompt_segments(body: Mapping[str, Any]) -> list[str]:
    """The prompt of a request with `messages` or `input`. Raises Bad."""
    found = [
        f"<|tool|>\n{_written(tool)}"
        for tool in [*objects(body, "tools"), *objects(body, "functions")]
    ]
    for name in ("system", "instructions"):
        if body.get(name):
            found += ["<|system|>\n", *content_segments(body[name])]
    if body.get("messages") is not None:
        messages = objects(body, "messages")
        for message in messages:
            found += message_segments(message)
        last = messages[-1].get("role") if messages else None
        continued = last == "assistant"  # the answer goes on from there
    else:
        continued = False
        found += _items(body.get("input"))
    if not found:
        raise Bad("its prompt is empty")
    return found if continued else [*found, "<|assistant|>\n"]


def answer_segments(answer: Mapping[str, Any]) -> list[str]:
    """What a request gets back, as its history will hold it. Raises Bad."""
    choices = objects(answer, "choices")
    if choices:
        message = choices[0].get("message")
        if isinstance(message, dict):
            return _inside(message)
        text = choices[0].get("text")
        return [text] if isinstance(text, str) and text else []
    if isinstance(answer.get("output"), list):
        return [segment for item in objects(answer, "output") for segment in _item(item)[1]]
    return content_segments(answer.get("content"))


def message_segments(message: Mapping[str, Any]) -> list[str]:
    """A message with its mark. Raises Bad."""
    role = message.get("role")
    if not isinstance(role, str):
        raise Bad("a message has no role")
    whose = [str(message[name]) for name in ("name", "tool_call_id") if message.get(name)]
    return [f"<|{' '.join([role, *whose])}|>\n", *_inside(message)]


def _inside(message: Mapping[str, Any]) -> list[str]:
    found = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        found.append(reasoning)
    found += content_segments(message.get("content"))
    calls = objects(message, "tool_calls")
    if isinstance(message.get("function_call"), dict):
        calls = [*calls, {"function": message["function_call"]}]
    for call in calls:
        said = call.get("function")
        if not isinstance(said, dict):
            said = call
        found.append(_call(call.get("id"), said.get("name"), said.get("arguments")))
    return found


def content_segments(content: object) -> list[str]:
    """A message's content: text, or parts of several kinds; texts that follow each other are one.
    Raises Bad."""
    if content is None:
        return []
    if isinstance(content, str):
        if content in _LEFT_OUT:
            raise Bad(f"its text is left out ({content!r}), so prompts seem to be alike")
        return [content] if content else []
    if not isinstance(content, list):
        raise Bad(f"a content is a string or a list of parts, not {type(content).__name__}")
    found: list[str] = []
    was_text = False
    for part in content:
        is_text = isinstance(part, str) or (isinstance(part, dict) and part.get("type") in _TEXTS)
        made = content_segments(_text_of(part)) if is_text else []
        if is_text and was_text and made:
            found[-1] += made[0]
        else:
            found += made if is_text else _part(part)
        was_text = is_text and bool(found)
    return found


def _text_of(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text")
    if not isinstance(text, str):
        raise Bad("a part of type text has no text")
    return text


def _part(part: object) -> list[str]:
    """A part that is no text."""
    if not isinstance(part, dict):
        raise Bad(f"a part of a content is an object, not {type(part).__name__}")
    kind = str(part.get("type"))
    if kind in ("tool_use", "server_tool_use"):
        return [_call(part.get("id"), part.get("name"), part.get("input"))]
    if kind == "tool_result":
        mark = f"<|result {part.get('tool_use_id')}|>\n"
        return [mark, *content_segments(part.get("content"))]
    if kind in ("thinking", "reasoning") and isinstance(part.get(kind), str):
        return [part[kind]]
    if any(kind.removeprefix("input_").startswith(media) for media in _MEDIA_KINDS):
        digest = sha256(_written(part).encode("utf-8", "surrogatepass")).hexdigest()
        return [f"{MEDIA}{kind} {digest[:16]}|>"]
    return [_written(part)]


def _items(given: object) -> Iterator[str]:
    """The items of the responses API; those of one side share a mark."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise Bad("there are no messages, and input is neither a string nor a list of items")
    before = None
    for item in given:
        role, segments = _item(item)
        if role != before:
            yield f"<|{role}|>\n"
        yield from segments
        before = role


def _item(item: Mapping[str, Any]) -> tuple[str, Sequence[str]]:
    """Who says an item of the responses API, and what."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise Bad("a message has no role")
        return role, content_segments(item.get("content"))
    if kind == "function_call":
        return "assistant", [_call(item.get("call_id"), item.get("name"), item.get("arguments"))]
    if kind == "function_call_output":
        output = item.get("output")
        return f"tool {item.get('call_id')}", content_segments(output)
    if kind == "item_reference":
        raise Bad("it names an item that the server keeps, and that is not in the log")
    rest = {name: value for name, value in item.items() if name not in _OF_ITEMS}
    return ("tool" if str(kind).endswith("_output") else "assistant"), [_written(rest)]


def _call(call_id: object, name: object, arguments: object) -> str:
    said = arguments if isinstance(arguments, str) else _written(arguments)
    return f"<|call {call_id} {name}|>\n{said}"


def _written(value: object) -> str:
    if isinstance(value, dict):
        value = {name: one for name, one in value.items() if name not in _STEERING}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
