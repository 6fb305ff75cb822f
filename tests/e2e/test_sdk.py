"""OpenAI's own client against a served model, from chat to errors: what a user's first day is."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from foreword.engine.engine import TorchEngine
from foreword.engine.settings import EngineSettings
from serving import serving
from tiny import make_tiny

SAY: Any = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Hello!"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = make_tiny(tmp_path_factory.mktemp("sdk") / "tiny", max_model_len=2048)
    engine = TorchEngine.load(EngineSettings(str(folder), kv_bytes=8 << 20, exact=False))
    engine.start()
    with (
        serving(engine) as url,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("NO_PROXY", "127.0.0.1")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            yield client
    asyncio.run(engine.stop(0))
    assert engine.stats.leased_bytes == 0


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": SAY, "max_tokens": 20, "temperature": 0, **fields}
    )


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_the_second_chat_reuses_the_first_and_says_the_same(client: openai.OpenAI) -> None:
    first, second = chat(client), chat(client)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    turns = [*SAY, first.choices[0].message, {"role": "user", "content": "And now?"}]
    third = chat(client, messages=turns)
    assert third.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    stream = chat(client, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == chat(client).choices[0].message.content
    assert last.usage.completion_tokens == 20 or chunks[-1].choices[0].finish_reason == "stop"


def test_samples_and_seeds(client: openai.OpenAI) -> None:
    drawn = [
        [choice.message.content for choice in chat(client, n=3, temperature=1, seed=5).choices]
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3


def test_logprobs(client: openai.OpenAI) -> None:
    (choice,) = chat(client, logprobs=True, top_logprobs=3).choices
    for token in choice.logprobs.content:
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (top.logprob for top in token.top_logprobs), reverse=True
        )
        assert token.logprob == token.top_logprobs[0].logprob, "greedy"


def test_prompts_as_text_lists_and_token_ids(client: openai.OpenAI) -> None:
    def texts(prompt: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0)
        return [choice.text for choice in answer.choices]

    ids = [40, 41, 42, 43]
    assert texts([ids, "Once upon"]) == [*texts(ids), *texts("Once upon")]


def test_a_forced_call_and_its_result(client: openai.OpenAI) -> None:
    (choice,) = chat(client, tools=TOOLS, tool_choice="required", max_tokens=200).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    again = chat(client, messages=[*SAY, choice.message, result], tools=TOOLS)
    assert again.usage.prompt_tokens > 0


def test_an_answer_by_a_schema(client: openai.OpenAI) -> None:
    named = {"name": "weather", "schema": SCHEMA, "strict": True}
    wanted = {"type": "json_schema", "json_schema": named}
    (choice,) = chat(client, response_format=wanted, max_tokens=200).choices
    assert choice.finish_reason == "stop"
    assert set(json.loads(choice.message.content)) == {"city", "degrees"}


def test_leaving_a_stream_and_asking_again(client: openai.OpenAI) -> None:
    stream = chat(client, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    threads = [threading.Thread(target=chat, args=(client,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"model": "other"}, openai.NotFoundError, "this server has 'tiny'"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 5000}, openai.BadRequestError, "this model's context"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "did you mean 'temperature'"),
    ],
)
def test_errors(client: openai.OpenAI, fields: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        chat(client, **fields)
