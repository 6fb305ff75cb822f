"""What the server refuses: OpenAI's error shape, a 4xx, and words that say what to change."""

from typing import Any

import httpx
import pytest

from echo import EchoEngine
from foreword.server.bodies import BODY_BYTES_MAX

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(CHAT, json={"model": "echo", "messages": MESSAGES, **fields})


def text(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(TEXT, json={"model": "echo", "prompt": "hello", **fields})


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


# field, value, words of the message
BAD_CHAT = [
    ("messages", [], "empty"),
    ("messages", "hi", "list of messages"),
    ("messages", ["hi"], "role and content"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ("messages", [{"role": "bot", "content": "x"}], "system, developer, user, assistant, tool"),
    ("messages", [{"role": {}, "content": "x"}], "system, developer"),
    ("messages", [{"role": "user", "content": 3}], "text parts"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
    ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 1}]}], "a string"),
    ("messages", [{"role": "user", "content": "x", "nam": "y"}], "did you mean 'name'"),
    ("messages", [{"role": "assistant", "content": "x", "tool_calls": [1]}], "tool_calls[0]"),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [1]}], "not supported"),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "1"}]}], "tool_calls[0].function"),
    ("messages", [{"role": "assistant", "tool_calls": [call("1")]}], "as JSON in a string"),
    ("messages", [{"role": "assistant", "tool_calls": [call("{")]}], "as JSON in a string"),
    ("messages", [{"role": "assistant"}], "messages[0].content"),
    ("messages", [{"role": "assistant", "content": "x"}], "template wants a user"),
    ("messages", [{"role": "user", "content": "x" * 1000}], "1007 tokens"),
    ("max_tokens", 989, "together 1001, over this model's context of 1000"),
    ("max_tokens", 0, "from 1"),
    ("max_tokens", True, "an integer"),
    ("max_tokens", 2.0, "an integer"),
    ("max_tokens", 10**30, "must lie"),
    ("max_completion_tokens", "9", "an integer"),
    ("temperature", 2.1, "from 0 to 2"),
    ("temperature", False, "a number"),
    ("temperature", 10**400, "from 0 to 2"),
    ("top_p", -0.1, "from 0 to 1"),
    ("top_k", -1, "from 0"),
    ("seed", 1 << 63, "must lie"),
    ("n", 129, "from 1 to 128"),
    ("n", 0, "from 1 to 128"),
    ("stop", ["a"] * 5, "at most 4"),
    ("stop", "", "empty string"),
    ("stop", [1], "list of strings"),
    ("logprobs", 3, "true or false"),
    ("top_logprobs", 2, "needs 'logprobs': true"),
    ("logit_bias", {"256": 1}, "0 to 255"),
    ("logit_bias", {"x": 1}, "token ids"),
    ("logit_bias", {"1": 101}, "from -100 to 100"),
    ("logit_bias", [1], "an object"),
    ("stream", "yes", "true or false"),
    ("stream_options", {"include_usage": True}, "needs 'stream': true"),
    ("cache_salt", "x" * 129, "1 to 128"),
    ("cache_salt", "", "1 to 128"),
    ("cache_salt", 5, "a string"),
    ("presence_penalty", 2.5, "from -2 to 2"),
    ("presence_penalty", False, "a number"),
    ("frequency_penalty", -3, "from -2 to 2"),
    ("repetition_penalty", 0, "from 0.01 to 100"),
    ("prompt_logprobs", 21, "from 0 to 20"),
    ("min_p", 1.5, "from 0 to 1"),
    ("min_tokens", -1, "from 0"),
    ("min_tokens", 989, "more than the 988 tokens"),
    ("temprature", 1, "did you mean 'temperature'"),
    ("\n" * 5000, 1, "Unknown field"),
    ("model", 5, "a string"),
    ("model", None, "'model' is missing"),
]
BAD_TEXT = [
    ("prompt", None, "'prompt' is missing"),
    ("prompt", "", "empty"),
    ("prompt", [], "empty"),
    ("prompt", 5, "a string or a list of token ids"),
    ("prompt", ["a", 1], "prompt[1]"),
    ("prompt", ["a", ""], "empty"),
    ("prompt", [[1], [2, "b"]], "prompt[1][1]"),
    ("prompt", ["a"] * 129, "at most 128"),
    ("prompt", [1, True], "prompt[1]"),
    ("prompt", [1, 256], "0 to 255"),
    ("logprobs", 6, "from 0 to 5"),
    ("logprobs", True, "an integer"),
    ("echo", True, "not supported"),
    ("suffix", "x", "not supported"),
    ("messages", MESSAGES, "Unknown field"),
]


def refused(response: httpx.Response, words: str, status: int = 400) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert response.status_code == status
    assert len(error["message"]) < 400
    return dict(error)


def test_bad_fields_are_named(http: httpx.Client, engine: EchoEngine) -> None:
    for name, value, words in BAD_CHAT:
        error = refused(chat(http, **{name: value}), words)
        if error["code"] != "context_length_exceeded":
            assert error["param"].startswith(name[:64])
    for name, value, words in BAD_TEXT:
        assert refused(text(http, **{name: value}), words)["param"].startswith(name)
    conflict = chat(http, max_tokens=5, max_completion_tokens=6)
    assert refused(conflict, "send one of them")["param"] == "max_tokens"
    options = chat(http, stream=True, stream_options={"include_usag": True})
    assert (
        refused(options, "did you mean 'include_usage'")["param"] == "stream_options.include_usag"
    )
    assert not [request for request in engine.requests if request.prompt]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "a JSON object"),
        (b"\xff", "not UTF-8"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"model": "echo", "prompt": "x", "temperature": 1e999}', "from 0 to 2"),
        (b'{"model": "echo", "prompt": "\\ud83d"}', "surrogate"),
        (b'{"model": "echo", "prompt": "x", "\\udc00": 1}', "surrogate"),
        (b'{"model": "echo", "prompt": ' + b"[" * 100_000, "nested"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_bad_json(http: httpx.Client, body: bytes, words: str) -> None:
    refused(http.post(TEXT, content=body), words)


def test_deep_but_valid_json_is_refused(http: httpx.Client) -> None:
    for depth in (100, 500, 900, 970, 990):
        value = "[" * depth + "]" * depth
        body = f'{{"model": "echo", "prompt": "x", "seed": {value}}}'
        assert refused(http.post(TEXT, content=body), "")["code"] in {
            "invalid_type",
            "invalid_json",
        }


def test_body_limit(http: httpx.Client) -> None:
    body = b'{"prompt": "' + b"x" * BODY_BYTES_MAX + b'"}'
    refused(http.post(TEXT, content=body), f"at most {BODY_BYTES_MAX}", 413)


def test_wrong_model_route_and_method(http: httpx.Client) -> None:
    error = refused(chat(http, model="gpt-4"), "this server has 'echo'", 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    refused(http.get("/v1/nothing"), "POST /v1/chat/completions", 404)
    response = http.get(CHAT)
    refused(response, "Method Not Allowed", 405)
    assert response.headers["allow"] == "POST"
