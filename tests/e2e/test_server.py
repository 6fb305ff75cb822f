"""The server over a real socket, asked by OpenAI's own client and by httpx."""

import json
import time
from typing import Any

import httpx
import openai
import pytest

from echo import EchoEngine

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


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
        "min_p": 0.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
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
    assert (sampling.min_p, sampling.min_tokens, sampling.repetition_penalty) == (0.1, 3, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 2.0)
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


def test_several_prompts_are_one_answer(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.completions.create(model="echo", prompt=["ab", "cde"], n=2, echo=False)
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(["ab"] * 2 + ["cde"] * 2))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 10)
    again = text(
        http, prompt=[[97, 98], "cde"], stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = events(again)
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    texts = {index: "" for index in range(2)}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "ab", 1: "cde"}
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 1 + 2


def test_prompt_logprobs(http: httpx.Client) -> None:
    answer = text(http, prompt=["hi", [104, 101]], n=2, max_tokens=1, prompt_logprobs=1).json()
    least, token = {"logprob": -0.25, "decoded_token": "\x00"}, {"logprob": -1.0}
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [
        [None, {"0": least, "105": {**token, "decoded_token": "i"}}],
        [None, {"0": least, "105": {**token, "decoded_token": "i"}}],
        [None, {"0": least, "101": {**token, "decoded_token": "e"}}],
        [None, {"0": least, "101": {**token, "decoded_token": "e"}}],
    ]
    (choice,) = chat(http, prompt_logprobs=0).json()["choices"]
    assert len(choice["prompt_logprobs"]) == len("user: hello\n")
    assert "prompt_logprobs" not in chat(http).json()["choices"][0]


def test_leaving_cancels_every_prompt(http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.01
    body = {"model": "echo", "prompt": ["x", "y", "z"], "ignore_eos": True, "stream": True}
    with http.stream("POST", TEXT, json=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
    deadline_s = time.monotonic() + 5
    while engine.num_open and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert engine.num_open == 0
    assert len(engine.requests) == 3


def test_models_and_health(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").owned_by == "foreword"
    with pytest.raises(openai.NotFoundError, match="this server has 'echo'"):
        client.models.retrieve("gpt/4")
    assert http.get("/health").json() == {"status": "ok"}


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
