"""Tool calls in a model's text, however it is cut; and tools for a model that knows none."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.server.tools import ToolCalls, Tools, told

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

# JSON to Python, and still nothing that could be sent to a client.
UNWRITABLE = [
    CALL.replace('{"a": 1}', arguments)
    for arguments in ('{"a": "\\ud800"}', '{"a": NaN}', '{"a": 1e999}', '{"a":' * 2000 + "}" * 2000)
]
UNWRITABLE += [CALL.replace("1", "[" * deep + "]" * deep) for deep in (600, 100_000)]
UNWRITABLE += [CALL.replace('"add"', "7"), CALL.replace('"add"', '["add"]')]

BARE = '{"name": "add", "arguments": {"a": 1}}'


def split(text: str, cuts: list[int], style: Any = "tagged") -> tuple[str, list[dict[str, Any]]]:
    """What comes of a text that is pushed in pieces."""
    parser = ToolCalls(("add", "mul", "7"), style)
    at = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    said, calls = "", []
    for start, stop in pairwise(at):
        more, found = parser.push(text[start:stop])
        said, calls = said + more, calls + found
    more, found = parser.flush()
    calls += found
    assert parser.num_calls == len(calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return said + more, [call["function"] for call in calls]


@pytest.mark.parametrize(
    ("text", "said", "names"),
    [
        ("no call, 1 < 2 <tool", "no call, 1 < 2 <tool", []),
        (CALL, "", ["add"]),
        (f"I add. {CALL}", "I add. ", ["add"]),
        (f"{CALL}\n{CALL.replace('add', 'mul')}", "", ["add", "mul"]),
        (CALL[:-3], CALL[:-3], []),
        (f"{CALL}\n{CALL[:-3]}", "", ["add"]),
        (f"{CALL}\n<tool_", "", ["add"]),
        (f'<tool_call>{{"open": "{CALL}', f'<tool_call>{{"open": "{CALL}', []),
        ("<tool_call>not JSON</tool_call> so", "<tool_call>not JSON</tool_call> so", []),
        (CALL.replace("add", "del"), CALL.replace("add", "del"), []),
        (CALL.replace('{"a": 1}', "3"), CALL.replace('{"a": 1}', "3"), []),
        (f"<<tool_call> {CALL}", f"<<tool_call> {CALL}", []),
        *((text, text, []) for text in UNWRITABLE),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_calls_between_tags(text: str, said: str, names: list[str], cuts: list[int]) -> None:
    got, calls = split(text, cuts)
    assert got.rstrip() == said.rstrip()
    assert [call["name"] for call in calls] == names
    assert all(json.loads(call["arguments"]) == {"a": 1} for call in calls)


@pytest.mark.parametrize(
    ("text", "said", "names"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', "", ["add"]),
        (f" [{BARE}, {BARE.replace('add', 'mul')}]", "", ["add", "mul"]),
        ('{"sum": 3}', '{"sum": 3}', []),
        ("The sum is {3}.", "The sum is {3}.", []),
        ('{"name": "add", "param', '{"name": "add", "param', []),
        ("", "", []),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_calls_that_are_all_of_an_answer(
    text: str, said: str, names: list[str], cuts: list[int]
) -> None:
    got, calls = split(text, cuts, "bare")
    assert got == said
    assert [call["name"] for call in calls] == names


@given(st.text(alphabet=list('<tol_cal>/{}\n"x'), max_size=60), st.lists(st.integers(0, 60)))
def test_text_without_calls_is_left_as_it_is(text: str, cuts: list[int]) -> None:
    for style in ("tagged", "bare"):
        assert split(text, cuts, style) == (text, [])


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_a_tag_inside_of_an_argument_is_no_tag(cuts: list[int]) -> None:
    inside = '{"name": "add", "arguments": {"a": "</tool_call> \\" </tool_call>"}}'
    said, calls = split(f"<tool_call>{inside}</tool_call>", cuts)
    assert said == ""
    assert [json.loads(call["arguments"]) for call in calls] == [json.loads(inside)["arguments"]]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_tools_are_explained_in_the_system_message() -> None:
    tools = Tools((tool("add"),), ("add",))
    user = {"role": "user", "content": "1 + 1"}
    for first in ([], [{"role": "system", "content": "Be short."}]):
        system, *rest = told([*first, user], tools)
        assert system["role"] == "system"
        assert system["content"].startswith("Be short.\n\n" if first else "You may call tools.")
        assert json.dumps(tool("add")["function"]) in system["content"]
        assert rest == [user]
    assert told([user], Tools()) == [user]


def test_calls_and_results_become_text() -> None:
    function = {"name": "add", "arguments": {"a": 1}}
    call = {"id": "1", "type": "function", "function": function}
    asked, answered = told(
        [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        Tools(),
    )
    assert asked == {"role": "assistant", "content": CALL}
    assert answered == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
    assert split(asked["content"], [])[1] == [{"name": "add", "arguments": '{"a": 1}'}]
