"""A chat's messages, checked: what a chat template gets."""

from typing import Any

from foreword.server.errors import ApiError
from foreword.server.fields import Fields, json_in, shown, wrong_type
from foreword.server.hints import MARKS, check_mark

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_NAME_CHARACTERS = 64
MAX_ID_CHARACTERS = 128
CALL_INDEXES = tuple(range(128))
# Fields of the API that this server does not have, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}


def parse_messages(messages: Any) -> list[dict[str, Any]]:
    """Each with a role, and content that is text; `developer` is read as `system`. The arguments of
    tool calls are objects, as templates want them."""
    if not isinstance(messages, list):
        raise wrong_type("messages", "a list of messages", messages)
    if not messages:
        raise ApiError("'messages' is empty: send at least one.", "messages")
    return [_message(f"messages[{at}]", message) for at, message in enumerate(messages)]


def _message(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object with role and content", value)
    fields = Fields(value, path)
    role = fields.required("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise ApiError(
            f"'{path}.role' is {shown(role)}; this server takes {known}.", f"{path}.role"
        )
    fields.only(known_fields(role), unsupported_fields(role))
    check_mark(fields)
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if "name" in fields:
        message["name"] = fields.text("name", "", MAX_NAME_CHARACTERS)
    if role == "tool":
        fields.required("tool_call_id")
        message["tool_call_id"] = fields.text("tool_call_id", "", MAX_ID_CHARACTERS)
    made = fields.get("tool_calls") if "tool_calls" in fields else []
    calls = _calls(f"{path}.tool_calls", made)
    if calls:
        message["tool_calls"] = calls
    said = fields.get("content") if calls else fields.required("content")
    return {**message, "content": "" if said is None else _content(f"{path}.content", said)}


def known_fields(role: str) -> tuple[str, ...]:
    own = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}.get(role, ())
    return ("role", "content", "name", *own, *MARKS)


def unsupported_fields(role: str) -> dict[str, tuple[Any, ...]]:
    """With those of other roles' messages: an official client may send an empty list."""
    other = {"assistant": "tool_call_id", "tool": "tool_calls"}
    names = [other[role]] if role in other else ["tool_calls", "tool_call_id"]
    return UNSUPPORTED | {name: ([],) if name == "tool_calls" else () for name in names}


def _calls(path: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong_type(path, "a list of calls", value)
    return [_call(f"{path}[{at}]", call) for at, call in enumerate(value)]


def _call(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object with id and function", value)
    fields = Fields(value, path)
    fields.only(("id", "function"), {"type": ("function",), "index": CALL_INDEXES})
    fields.required("function")
    function = Fields(fields.object("function"), f"{path}.function")
    function.only(("name", "arguments"), {})
    function.required("name")
    text = function.required("arguments")
    arguments = json_in(text) if isinstance(text, str) else None
    if not isinstance(arguments, dict):
        raise wrong_type(f"{path}.function.arguments", "an object, as JSON in a string", text)
    named = {"name": function.text("name", "", MAX_NAME_CHARACTERS), "arguments": arguments}
    return {"id": fields.text("id", "", MAX_ID_CHARACTERS), "type": "function", "function": named}


def _content(path: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(path, "a string or a list of text parts", value)
    texts = []
    for at, part in enumerate(value):
        here = f"{path}[{at}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None:
            raise wrong_type(here, 'a part such as {"type": "text", "text": "..."}', part)
        if kind != "text":
            raise ApiError(
                f"'{here}' is a part of type {shown(kind)}; only 'text' parts are supported.",
                f"{here}.type",
                "unsupported_value",
            )
        fields = Fields(part, here)
        fields.only(("type", "text", *MARKS), {})
        check_mark(fields)
        text = fields.required("text")
        if not isinstance(text, str):
            raise wrong_type(f"{here}.text", "a string", text)
        texts.append(text)
    return "\n".join(texts)
