"""Tools and formats: through HTTP with the official client, and by a model that must obey."""

import asyncio
import json
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from echo import EchoEngine
from foreword.core.errors import EngineBusy, RequestError
from foreword.core.request import Engine, ModelCard
from foreword.engine import grammar as grammar_module
from foreword.engine.engine import TorchEngine
from foreword.engine.settings import EngineSettings
from foreword.server.openai import parse
from foreword.server.tools import Tools
from tiny import make_tiny

CHAT = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def function(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: Any = [function("add", a={"type": "integer"}), function("mul", b={"enum": ["x", "y"]})]


def chat(http: httpx.Client, content: str = "hello", **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return http.post(CHAT, json={"model": "echo", "messages": messages, **fields})


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine(max_model_len=8000)


def test_calls_reach_the_official_client(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": CALL}]
    answer = client.chat.completions.create(model="echo", messages=messages, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    # The answer and its result go back as the client holds them.
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    again = client.chat.completions.create(
        model="echo", messages=[*messages, choice.message, result], tools=TOOLS
    )
    assert "<tool_response>\n2\n</tool_response>" in str(again.choices[0].message.content)


def test_calls_in_a_stream(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": f"{CALL}\n{CALL.replace('add', 'mul')}"}]
    stream = client.chat.completions.create(
        model="echo", messages=messages, tools=TOOLS, stream=True
    )
    deltas = [chunk.choices[0] for chunk in stream]
    calls = [call for choice in deltas for call in choice.delta.tool_calls or []]
    assert [(call.index, call.function and call.function.name) for call in calls] == [
        (0, "add"),
        (1, "mul"),
    ]
    assert deltas[-1].finish_reason == "tool_calls"
    said = "".join(choice.delta.content or "" for choice in deltas)
    assert "user: " in said
    assert '"name": "add", "arguments"' not in said


def test_without_tools_the_same_text_is_text(http: httpx.Client) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = chat(http, CALL, **fields).json()["choices"][0]
        assert choice["message"]["content"] == f"user: {CALL}\n"
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_a_template_that_knows_tools_gets_them(http: httpx.Client, engine: EchoEngine) -> None:
    engine.card = ModelCard("echo", 1000, 256, "bare")
    choice = chat(http, "hi", tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] == "user: hi\n"
    assert engine.tools == TOOLS


BAD = [
    ("tools", "x", "a list of tools"),
    ("tools", False, "a list of tools"),
    ("tools", {}, "a list of tools"),
    ("tools", [1], "tools[0]"),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("tools", [{"type": "code", "function": {"name": "a"}}], "tools[0].type"),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ("tools", [{"type": "function", "function": {"name": "a", "parameters": 1}}], "parameters"),
    ("tools", [{"type": "function", "function": {"name": "a", "parameter": {}}}], "did you mean"),
    ("tools", TOOLS * 65, "at most 128"),
    ("tool_choice", "required", "needs 'tools'"),
    ("tool_choice", 5, "needs 'tools'"),
    ("parallel_tool_calls", "no", "true or false"),
    ("response_format", "json", "an object"),
    ("response_format", {"type": "yaml"}, "json_schema"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}, "schema"),
    ("response_format", {"type": "json_object", "schema": {}}, "Unknown field"),
    (
        "tools",
        [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#"}}}],
        "'tools[0].function.parameters' has a part that demands itself without end",
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        "'response_format.json_schema.schema' has a part that demands itself without end",
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": {"title": "no grammar"}}},
        "cannot be followed",
    ),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD, ids=range(len(BAD)))
def test_bad_fields_are_named(
    http: httpx.Client, engine: EchoEngine, name: str, value: Any, words: str
) -> None:
    answer = chat(http, **{name: value})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert words in error["message"]
    assert error["param"].startswith(name)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (5, "'none', 'auto', 'required'"),
        ({"type": "function"}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "sub"}}, "no such function"),
        ({"type": "function", "function": {"name": "add", "strict": True}}, "Unknown field"),
    ],
)
def test_bad_choices_are_named(http: httpx.Client, choice: Any, words: str) -> None:
    answer = chat(http, tools=TOOLS, tool_choice=choice)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (False, "a list of calls"),
        ({}, "a list of calls"),
        *(
            ([{"id": "a", "function": {"name": "add", "arguments": arguments}}], "JSON in a string")
            for arguments in ('{"a": "\\ud800"}', '{"a":' * 5000 + "1" + "}" * 5000, '{"a": NaN}')
        ),
    ],
    ids=["false", "object", "surrogate", "deep", "nan"],
)
def test_calls_that_no_model_could_read_are_refused(
    http: httpx.Client, calls: Any, words: str
) -> None:
    said = {"role": "assistant", "content": "x", "tool_calls": calls}
    messages = [{"role": "user", "content": "x"}, said]
    answer = http.post(CHAT, json={"model": "echo", "messages": messages})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_deep_schema_is_refused(http: httpx.Client) -> None:
    """There is no depth at which it is taken, and then cannot be written again."""
    for depth in (300, 600, *range(970, 990)):
        schema = '{"x":' * depth + "1" + "}" * depth
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
        body = (
            '{"model": "echo", "messages": [{"role": "user", "content": "x"}], '
            f'"max_tokens": 1, "tool_choice": "required", "tools": [{tool}]}}'
        )
        answer = http.post(CHAT, content=body)
        refused = answer.status_code == 400 and "nested too deeply" in answer.text
        assert refused is (depth >= 500), depth


def test_what_excludes_each_other_is_refused(http: httpx.Client) -> None:
    json_object = {"type": "json_object"}
    both = chat(http, tools=TOOLS, tool_choice="required", response_format=json_object)
    endless = chat(http, response_format=json_object, ignore_eos=True)
    longer = chat(http, response_format=json_object, min_tokens=2)
    assert [both.status_code, endless.status_code, longer.status_code] == [400, 400, 400]
    assert longer.json()["error"]["param"] == "min_tokens"
    assert "send one of them" in both.json()["error"]["message"]
    assert endless.json()["error"]["param"] == "ignore_eos"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    folder = make_tiny(tmp_path_factory.mktemp("tiny"), max_model_len=2048)
    return TorchEngine.load(EngineSettings(str(folder), kv_bytes=8 << 20, exact=False))


async def answers(engine: Engine, fields: dict[str, Any], num: int) -> list[tuple[str, str | None]]:
    """Text and finish reason of `num` samples of a chat, at temperature 1."""
    messages = [{"role": "user", "content": "Say."}]
    body = {
        "model": engine.card.name,
        "messages": messages,
        "n": num,
        "seed": 7,
        "max_tokens": 80,
        **fields,
    }
    (request,) = parse(engine, "chat", json.dumps(body).encode()).requests
    texts, reasons = [""] * num, [None] * num
    async for output in engine.generate(request):
        texts[output.index] += output.text
        reasons[output.index] = output.finish_reason
    return list(zip(texts, reasons, strict=True))


def test_a_model_that_knows_nothing_obeys_formats_and_choices(served: TorchEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "of": {"enum": ["cats", "dogs"]}},
        "required": ["n", "of"],
        "additionalProperties": False,
    }
    named = {"type": "json_schema", "json_schema": {"name": "pets", "schema": schema}}
    forced = {"tools": TOOLS, "tool_choice": "required"}
    one = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mul"}}}

    async def whole() -> None:
        served.start()
        try:
            for text, reason in await answers(served, {"response_format": named}, 6):
                if reason == "stop":
                    found = json.loads(text)
                    assert set(found) == {"n", "of"}
                    assert type(found["n"]) is int
                assert text.startswith('{"n": ')
            calls = await answers(served, forced, 6)
            calls += await answers(served, one, 4)
            for at, (text, reason) in enumerate(calls):
                assert text.startswith('<tool_call>\n{"name": "')
                if reason == "stop" and at >= 6:
                    inside = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
                    call = json.loads(inside)
                    assert call["name"] == "mul"
                    assert call["arguments"]["b"] in ("x", "y")
            assert [reason for _text, reason in calls[6:]] == ["stop"] * 4
            assert all(text.count("<tool_call>") == 1 for text, _reason in calls)
            several = await answers(served, {**forced, "parallel_tool_calls": True}, 12)
            assert max(text.count("<tool_call>") for text, _reason in several) > 1
            for text, _reason in await answers(
                served, {"response_format": {"type": "json_object"}}, 4
            ):
                assert text.startswith("{")
        finally:
            await served.stop(0)

    asyncio.run(whole())


def test_compiled_grammars_are_kept_up_to_a_number(
    served: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = served._grammars
    compiled: list[str] = []
    compile_one = grammars._compiled

    def counted(grammar: str) -> Any:
        compiled.append(grammar)
        return compile_one(grammar)

    monkeypatch.setattr(grammars, "_compiled", counted)
    monkeypatch.setattr(grammars, "_known", OrderedDict())
    monkeypatch.setattr(grammar_module, "_MAX_KEPT", 2)
    for letter in "abacab":
        served.check_grammar(f'start: "{letter}" "kept"')
    assert [grammar[8] for grammar in compiled] == ["a", "b", "c", "b"]
    assert len(grammars._known) == 2


def test_a_tool_s_own_definitions_are_found(served: TorchEngine) -> None:
    city = {"$ref": "#/$defs/City"}
    parameters = {
        "type": "object",
        "properties": {"city": city},
        "required": ["city"],
        "$defs": {"City": {"enum": ["Paris"]}},
    }
    tools = [{"type": "function", "function": {"name": "go", "parameters": parameters}}, *TOOLS]
    style = Tools(tuple(tools), ("go", "add"), must=True)
    for kind in ("tagged", "bare"):
        served.check_grammar(style.grammar(kind))


def test_a_schema_that_takes_all_there_is_is_refused_in_time(
    served: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = [{"type": "string", "pattern": f"a{i}.*"} for i in range(30)]
    hostile = f"start: %json {json.dumps({'allOf': patterns})}"
    monkeypatch.setattr(grammar_module, "_TRIAL", grammar_module._TRIAL.replace("(5, 5)", "(1, 1)"))
    begin_s = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        refusals = [pool.submit(served.check_grammar, f"{hostile}\n// {i}") for i in range(3)]
        errors = [refusal.exception() for refusal in refusals]
    assert time.monotonic() - begin_s < 30
    assert {type(error) for error in errors} == {RequestError, EngineBusy}
    assert "more than 5 seconds" in str(next(e for e in errors if type(e) is RequestError))


def test_a_schema_that_cannot_be_followed_is_refused(served: TorchEngine) -> None:
    with pytest.raises(RequestError, match="cannot be followed"):
        served.check_grammar('start: %json {"type": "no such type"}')


def test_nothing_can_begin_an_answer(served: TorchEngine) -> None:
    """What the server's own look at the schema does not follow."""
    schema = {"$defs": {"a": {"$anchor": "x", "$ref": "#x"}}, "$ref": "#x"}
    with pytest.raises(RequestError, match="nothing can begin"):
        served.check_grammar(f"start: %json {json.dumps(schema)}")


def test_a_tree_can_be_answered(served: TorchEngine) -> None:
    node = {
        "type": "object",
        "properties": {
            "v": {"enum": [1, 2]},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
        },
        "required": ["v"],
        "additionalProperties": False,
    }
    schema = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    named = {"type": "json_schema", "json_schema": {"name": "tree", "schema": schema}}
    body = {"model": "x", "messages": [{"role": "user", "content": "x"}], "response_format": named}
    body["model"] = served.card.name
    (request,) = parse(served, "chat", json.dumps(body).encode()).requests
    matcher = served._grammars.matcher(request.sampling.grammar)
    text = '{"v": 1, "kids": [{"v": 2, "kids": []}]}'
    for token_id in served.encode(text):
        assert matcher.restrict(torch.zeros(served.card.vocab_size))[token_id] == 0
        matcher.accept(token_id)
    end = matcher.restrict(torch.zeros(served.card.vocab_size))
    assert end[served.model.end_token_id] == 0
