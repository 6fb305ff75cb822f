"""The server over a real socket, asked by OpenAI's own client and by httpx."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from echo import EchoEngine
from foreword.cli.serve import bind
from foreword.server.app import BODY_BYTES_MAX, create_app

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def url(engine: EchoEngine) -> Iterator[str]:
    config = uvicorn.Config(create_app(engine), log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        yield client


@pytest.fixture
def client(url: str, http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", http_client=http, max_retries=0)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(CHAT, json={"model": "echo", "messages": MESSAGES, **fields})


def text(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(TEXT, json={"model": "echo", "prompt": "hello", **fields})


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="echo", messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "user: hello\n")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 24
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_second_time_the_prompt_is_cached(client: openai.OpenAI) -> None:
    def cached(**extra: Any) -> int | None:
        answer = client.completions.create(model="echo", prompt="hello", extra_body=extra)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(), cached()] == [0, 4]
    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a")] == [0, 0, 4]


def test_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "né 🙂"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(delta or "" for delta in deltas) == "user: né 🙂\n"
    assert [c.choices[0].finish_reason for c in chunks][-2:] == [None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 15


def test_stream_without_usage_does_not_speak_of_it(http: httpx.Client) -> None:
    chunks = events(text(http, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert not any("usage" in chunk for chunk in chunks)


def test_n_samples_share_the_prompt(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.completions.create(model="echo", prompt="abc", n=2, max_tokens=2)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "ab", "length"),
        (1, "ab", "length"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    chunks = [chunk["choices"][0] for chunk in events(chat(http, n=2, stream=True))]
    for index in (0, 1):
        mine = [choice for choice in chunks if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"]["content"] for choice in mine) == "user: hello\n"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "é"}],
        logprobs=True,
        top_logprobs=2,
        max_tokens=7,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first, *_, part = logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("u", [117], -0.5)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("u", -0.5), ("v", -1.5)]
    assert (part.token, part.bytes) == ("\N{REPLACEMENT CHARACTER}", None)
    bare = client.chat.completions.create(model="echo", messages=MESSAGES, logprobs=True)
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.content is not None
    assert [token.top_logprobs for token in bare.choices[0].logprobs.content] == [[]] * 12


def test_text_logprobs(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.completions.create(model="echo", prompt="a🙂é!", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[0] == "a"
    assert logprobs.text_offset == [0, 1, 1, 1, 1, 2, 2, 3]
    assert logprobs.token_logprobs == [-0.5] * 8
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"a": -0.5}
    streamed = [c["choices"][0]["logprobs"] for c in events(text(http, logprobs=0, stream=True))]
    assert [offset for each in streamed for offset in each["text_offset"]] == [0, 1, 2, 3, 4]
    assert streamed[0]["top_logprobs"] == [{"h": -0.5}]


def test_sampling_reaches_the_engine(http: httpx.Client, engine: EchoEngine) -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "seed": -3,
        "stop": ["l", "x"],
        "max_completion_tokens": 9,
        "logit_bias": {"65": -100, "0": 1.5},
        "ignore_eos": True,
        "cache_salt": "tenant",
        "user": "somebody",
        "presence_penalty": 0,
        "tools": [],
        "response_format": {"type": "text"},
        "top_logprobs": None,
    }
    answer = chat(http, **fields)
    assert answer.json()["choices"][0]["message"]["content"] == "user: he"
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert (sampling.seed, sampling.stop, sampling.max_tokens) == (-3, ("l", "x"), 9)
    assert sampling.logit_bias == {65: -100.0, 0: 1.5}
    assert sampling.ignore_eos
    assert request.cache_salt == "tenant"


def test_prompts(http: httpx.Client, engine: EchoEngine) -> None:
    assert text(http, prompt=[104, 105]).json()["choices"][0]["text"] == "hi"
    assert text(http, prompt=["hi"]).json()["choices"][0]["text"] == "hi"
    assert engine.requests[0].sampling.max_tokens == engine.card.max_model_len - 2
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "c"},
        {"role": "user", "content": parts},
        # What the official client gives back for an answer of ours.
        {"role": "assistant", "content": "d", "refusal": None, "tool_calls": None},
    ]
    answer = chat(http, messages=messages).json()
    assert answer["choices"][0]["message"]["content"] == "system: c\nuser: a\nb\nassistant: d\n"


def test_models_and_health(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").owned_by == "foreword"
    with pytest.raises(openai.NotFoundError, match="this server has 'echo'"):
        client.models.retrieve("gpt/4")
    assert http.get("/health").json() == {"status": "ok"}


# field, value, words of the message
BAD_CHAT = [
    ("messages", [], "empty"),
    ("messages", "hi", "list of messages"),
    ("messages", ["hi"], "role and content"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "tool", "content": "x"}], "system, developer, user, assistant"),
    ("messages", [{"role": {}, "content": "x"}], "system, developer"),
    ("messages", [{"role": "user", "content": 3}], "text parts"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
    ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 1}]}], "a string"),
    ("messages", [{"role": "user", "content": "x", "nam": "y"}], "did you mean 'name'"),
    ("messages", [{"role": "assistant", "content": "x", "tool_calls": [1]}], "not supported"),
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
    ("tools", [{"type": "function"}], "not supported"),
    ("response_format", {"type": "json_object"}, "not supported"),
    ("presence_penalty", 0.5, "not supported"),
    ("presence_penalty", False, "not supported"),
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
    ("prompt", ["a", "b"], "several prompts"),
    ("prompt", [[1], [2]], "several prompts"),
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


def test_escaped_pairs_are_text(http: httpx.Client) -> None:
    body = b'{"model": "echo", "prompt": "\\ud83d\\ude42"}'
    assert http.post(TEXT, content=body).json()["choices"][0]["text"] == "🙂"


def test_leaving_a_stream_cancels(http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.01
    body = {"model": "echo", "prompt": "x", "ignore_eos": True, "stream": True}
    with http.stream("POST", TEXT, json=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
    assert engine.cancelled.wait(5)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_an_answer_cancels(
    http: httpx.Client, engine: EchoEngine, stream: bool
) -> None:
    engine.step_s = 3.0
    body = {"model": "echo", "prompt": "x", "ignore_eos": True, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        http.post(TEXT, json=body, timeout=0.2)
    assert engine.cancelled.wait(2)
    assert http.get("/health").status_code == 200


def test_stopped_engine(http: httpx.Client, client: openai.OpenAI, engine: EchoEngine) -> None:
    engine.step_s = 0.01
    stream = client.completions.create(
        model="echo", prompt="x", stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices[0].text == "x"
    engine.stopped = True
    with pytest.raises(openai.APIError, match="The engine stopped"):
        list(stream)
    response = chat(http)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"
    assert chat(http, stream=True).status_code == 503
    assert http.get("/health").status_code == 503


def test_a_bug_is_a_500_in_the_same_shape(
    http: httpx.Client, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str) -> list[int]:
        raise RuntimeError(text)

    monkeypatch.setattr(engine, "encode", encode)
    response = text(http)
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "server_error"
    assert "hello" not in error["message"]
