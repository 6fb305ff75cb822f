"""`/openapi.json` is true: what it lets through is served, what it does not is refused, and every
answer is one that it names."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.python.asgi import ASGIClient, get_client
from schemathesis.specs.openapi.checks import positive_data_acceptance

from echo import EchoEngine
from foreword.server import messages, tokens
from foreword.server.app import create_app
from foreword.server.openai import KNOWN, UNSUPPORTED
from foreword.server.openapi import ERRORS, page

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guide" / "api.md"
POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


class AnyChat(EchoEngine):
    """Its template takes every chat."""

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        return self.encode("".join(f"{message['content']}\n" for message in messages))


APP = create_app(AnyChat(max_model_len=200))
SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json", APP, config=SchemathesisConfig(seed=20260101)
)
SCHEMA.config.phases.fuzzing.generation.max_examples = 25
PAGE = page(EchoEngine().card, asks_for_key=False)
SHAPES = PAGE["components"]["schemas"]
# Why a body that follows the page may be refused: what fields ask of each other, of the prompt's
# tokens and of the vocabulary, and an integer that is written as 1.0.
REASONS = re.compile(
    r"must be an integer, not \S+\.0\.$|must be a token id, not \S+\.0\.$|over this model's context"
    r"|'(prompt|prompt\[\d+\])' is empty|keys are token ids from|prompts; with this 'n'"
    r"|'max_completion_tokens' \d+: send one|more than the \d+ tokens that the answer may have"
    r"|'tool_choice' needs 'tools'|'tools' has no such function|an object, as JSON in a string"
    r"|asks for JSON and 'tool_choice' for a call|leave out '(ignore_eos|min_tokens)'"
    r"|come with a whole answer only"
)


@SCHEMA.parametrize()
def test_requests_are_answered_as_the_page_says(case: schemathesis.Case) -> None:
    response = case.call_and_validate(excluded_checks=[positive_data_acceptance])
    if case.meta and case.meta.generation.mode.is_positive and response.status_code != 200:
        assert REASONS.search(response.json()["error"]["message"]), response.text


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_follow_the_page_are_served(path: str) -> None:
    num_served = 0

    @given(SCHEMA[path]["POST"].as_strategy())
    @settings(max_examples=50)
    def check(case: schemathesis.Case) -> None:
        nonlocal num_served
        num_served += case.call().status_code == 200

    check()
    assert num_served > 3


def test_routes_are_those_of_the_server() -> None:
    routes = {
        route.path.replace(":path", ""): {method.lower() for method in route.methods - {"HEAD"}}
        for route in APP.routes
    }
    methods = {path: item.keys() - {"parameters"} for path, item in PAGE["paths"].items()}
    assert methods == routes


def test_fields_are_those_that_are_accepted() -> None:
    kinds = {"ChatRequest": "chat", "TextRequest": "text"}
    for name, kind in kinds.items():
        assert SHAPES[name]["properties"].keys() == {*KNOWN[kind], *UNSUPPORTED[kind]}
    for body in SHAPES["Tokenize"]["anyOf"]:
        assert body["properties"].keys() == {*tokens.TOKENIZE, *tokens.TOKENIZE_UNSUPPORTED}
    assert SHAPES["Detokenize"]["properties"].keys() == {*tokens.DETOKENIZE}
    seen = set()
    for message in SHAPES["Message"]["anyOf"]:
        for role in message["properties"]["role"]["enum"]:
            seen.add(role)
            known = {*messages.known_fields(role), *messages.unsupported_fields(role)}
            assert message["properties"].keys() == known
    assert seen == {*messages.ROLES}


def test_statuses_are_those_of_the_guide() -> None:
    table = re.findall(r"^\| (\d{3}) \|", GUIDE.read_text(), re.MULTILINE)
    assert {int(status) for status in table} == ERRORS.keys()
    named = {int(name) for item in PAGE["paths"].values() for name in _statuses(item)}
    assert named == {200, *ERRORS} - {405}  # no listed method has it


def _statuses(item: dict[str, Any]) -> list[str]:
    return [status for name in item.keys() - {"parameters"} for status in item[name]["responses"]]


def test_a_server_with_keys_says_so() -> None:
    with get_client(create_app(EchoEngine(), ["one"])) as http:
        paths = http.get("/openapi.json").json()["paths"]
    open_paths = {path for path, item in paths.items() if "security" not in str(item)}
    assert open_paths == {"/health", "/metrics", "/openapi.json"}
    assert "security" not in str(PAGE["paths"])


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
CALLED = [{"role": "user", "content": CALL}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/chat/completions", "Chat", {"messages": [{"role": "user", "content": "é"}]}),
        ("/v1/chat/completions", "Chat", {"messages": CALLED, "tools": TOOLS}),
        ("/v1/completions", "Text", {"prompt": ["é", [104]], "n": 2}),
    ],
)
def test_answers_hold_nothing_that_the_page_does_not_name(
    path: str, name: str, body: dict[str, Any], stream: bool
) -> None:
    shapes = {"components": {"schemas": _closed(SHAPES)}}
    shape = {**_closed(SHAPES[f"{name}{'Event' if stream else 'Answer'}"]), **shapes}
    many = {"logprobs": True, "top_logprobs": 2} if name == "Chat" else {"logprobs": 2}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    for logprobs in ({}, many):
        with get_client(create_app(EchoEngine()), max_stream_events=10_000) as http:
            asked = {"model": "echo", **body, "stream": stream, **options, **logprobs}
            answers = _answers(http, path, asked)
        for answer in answers:
            jsonschema_rs.validator_for(shape).validate(answer)
        assert ("tool_calls" in str(answers)) is ("tools" in body)


def _answers(http: ASGIClient, path: str, body: dict[str, Any]) -> list[Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200
    if not body["stream"]:
        return [answer.json()]
    *events, done, end = answer.content.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _closed(shape: Any) -> Any:
    """The same shape, whose objects have no more than their properties."""
    if isinstance(shape, list):
        return [_closed(item) for item in shape]
    if not isinstance(shape, dict):
        return shape
    closed = {name: _closed(value) for name, value in shape.items()}
    return {**closed, "additionalProperties": False} if "properties" in closed else closed
