"""Tools: what a request offers, how a model is told of them, and the calls in what it writes.

A model whose chat template knows tools is told by that, and writes calls in its own style. To any
other, the style of Hermes is explained in the system message.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.core.request import ToolStyle
from foreword.server.errors import ApiError
from foreword.server.fields import Fields, json_in, shown, wrong_type
from foreword.server.formats import json_rule, schema_of

MAX_TOOLS = 128
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TOLD = """You may call tools. These are theirs, as JSON, one in a line:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON, so:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""
_DEFINED = ("$defs", "definitions")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tools:
    """`definitions` as the request has them. `names` are those that may be called, and `must` says
    that one has to be."""

    definitions: tuple[dict[str, Any], ...] = ()
    names: tuple[str, ...] = ()
    must: bool = False
    several: bool = False  # calls in an answer that must be one: a small model would not end

    def grammar(self, style: ToolStyle) -> str:
        """Of an answer that must be a call; empty where it need not."""
        if not self.must:
            return ""
        schemas = [
            _call_schema(tool["function"], style)
            for tool in self.definitions
            if tool["function"]["name"] in self.names
        ]
        rules = [f"call{at}: {json_rule(schema)}" for at, schema in enumerate(schemas)]
        rules.append(f"call: {' | '.join(f'call{at}' for at in range(len(schemas)))}")
        if style == "bare":
            return "\n".join(["start: call", *rules])
        more = ' ("\\n" tagged)*' if self.several else ""
        tagged = f'tagged: "{OPEN}\\n" call "\\n{CLOSE}"'
        return "\n".join([f"start: tagged{more}", tagged, *rules])


def _call_schema(function: Mapping[str, Any], style: ToolStyle) -> dict[str, Any]:
    """Of a call of one function. What its parameters define stays at the root, where their
    references look for it."""
    parameters = dict(function.get("parameters") or {"type": "object"})
    defined = {name: parameters.pop(name) for name in _DEFINED if name in parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, _arguments_key(style): parameters},
        "required": ["name", _arguments_key(style)],
        "additionalProperties": False,
        **defined,
    }


def _arguments_key(style: ToolStyle) -> str:
    return "parameters" if style == "bare" else "arguments"


def parse_tools(fields: Fields) -> Tools:
    """The request's `tools`, `tool_choice` and `parallel_tool_calls`."""
    offered = fields.get("tools") if "tools" in fields else []
    if not isinstance(offered, list):
        raise wrong_type("tools", "a list of tools", offered)
    if len(offered) > MAX_TOOLS:
        raise ApiError(
            f"'tools' has {len(offered)} tools; at most {MAX_TOOLS} are allowed.", "tools"
        )
    definitions = tuple(_definition(f"tools[{at}]", tool) for at, tool in enumerate(offered))
    names = tuple(tool["function"]["name"] for tool in definitions)
    several = fields.boolean("parallel_tool_calls")
    choice = fields.get("tool_choice")
    if choice is None or choice == "auto":
        return Tools(definitions, names, several=several)
    if choice == "none":
        return Tools()
    if not definitions:
        raise ApiError("'tool_choice' needs 'tools'.", "tool_choice")
    if choice == "required":
        return Tools(definitions, names, must=True, several=several)
    if not isinstance(choice, dict):
        raise wrong_type("tool_choice", "'none', 'auto', 'required' or a function", choice)
    wanted = Fields(choice, "tool_choice")
    wanted.only(("function",), {"type": ("function",)})
    named = Fields(wanted.object("function"), "tool_choice.function")
    named.only(("name",), {})
    name = named.required("name")
    if name not in names:
        raise ApiError(
            f"'tool_choice.function.name' is {shown(name)}; 'tools' has no such function.",
            "tool_choice.function.name",
        )
    return Tools(definitions, (name,), must=True, several=False)


def _definition(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object with type and function", value)
    fields = Fields(value, path)
    fields.only(("function",), {"type": ("function",)})
    fields.required("type")
    fields.required("function")
    function = Fields(fields.object("function"), f"{path}.function")
    function.only(("name", "description", "parameters", "strict"), {})
    name = function.required("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong_type(
            f"{path}.function.name", "1 to 64 letters, digits, dashes or underscores", name
        )
    if "description" in function and not isinstance(function.get("description"), str):
        raise wrong_type(f"{path}.function.description", "a string", function.get("description"))
    if "parameters" in function:
        schema_of(function, "parameters")
    return value


def told(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """The same chat for a model whose template knows no tools: the tools in the system message,
    calls and results as text."""
    told = [_as_text(message) for message in messages]
    if not tools.definitions:
        return told
    lines = "\n".join(
        json.dumps(tool["function"], ensure_ascii=False) for tool in tools.definitions
    )
    explained = _TOLD.format(tools=lines)
    if told and told[0]["role"] == "system":
        explained = f"{told.pop(0)['content']}\n\n{explained}"
    return [{"role": "system", "content": explained}, *told]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [
        f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}"
        for call in message.get("tool_calls", ())
    ]
    if calls:
        plain["content"] = "\n".join([*([plain["content"]] if plain["content"] else []), *calls])
    return plain


class ToolCalls:
    """Splits an answer, as it comes, into text and calls. What is no call of a known tool stays
    text, as the model wrote it."""

    def __init__(self, names: Sequence[str], style: ToolStyle) -> None:
        self._names, self._style = frozenset(names), style
        self._held = ""
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text and the calls that are certain now."""
        self._held += text
        if self._style == "bare":
            # A call is all of the answer, so nothing is certain while it may still become one.
            if self._held.lstrip()[:1] in ("", "{", "[") and not self.num_calls:
                return "", []
            said, self._held = self._held, ""
            return said, []
        said, calls = "", []
        while (start := self._held.find(OPEN)) >= 0:
            stop = self._held.find(CLOSE, start)
            while stop >= 0 and _in_string(self._held[start + len(OPEN) : stop]):
                stop = self._held.find(CLOSE, stop + 1)
            if stop < 0:
                break
            inside = self._held[start + len(OPEN) : stop]
            found = self._calls(inside)
            said += self._held[:start] if found else self._held[: stop + len(CLOSE)]
            calls += found
            self._held = self._held[stop + len(CLOSE) :]
            if found:
                self._held = self._held.lstrip()
        if start < 0:  # hold back what may become a tag: it begins with the last "<"
            start = self._held.rfind(OPEN[0])
            if start < 0 or not OPEN.startswith(self._held[start:]):
                start = len(self._held)
        said, self._held = said + self._held[:start], self._held[start:]
        return (said if not calls or said.strip() else ""), calls

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left at the end. A call that was cut off is text, except after whole ones."""
        held, self._held = self._held, ""
        if self._style == "bare":
            calls = self._calls(held)
            return ("" if calls else held), calls
        cut = self.num_calls and held.strip().startswith(OPEN[: len(held.strip())])
        return ("" if cut else held), []

    def _calls(self, text: str) -> list[dict[str, Any]]:
        """The calls that a JSON text holds, one or a list; none where it is anything else."""
        found = json_in(text)
        calls = []
        for item in found if isinstance(found, list) else [found]:
            call = item if isinstance(item, dict) else {}
            name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
            if not isinstance(name, str) or name not in self._names:
                return []
            if not isinstance(arguments, dict):
                return []
            calls.append(self._call(name, arguments))
        self.num_calls += len(calls)
        return calls

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _in_string(text: str) -> bool:
    """Whether a JSON text ends inside of a string, where a tag is no tag."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False
