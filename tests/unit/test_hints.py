"""How a body says what is to become of its KV, in the words of several APIs."""

import json

import pytest

from echo import EchoEngine
from foreword.core.errors import RequestError
from foreword.core.request import NO_HINTS, Hints
from foreword.server.errors import error_body
from foreword.server.openai import parse

ENGINE = EchoEngine(max_model_len=500)
MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}


def text_hints(**fields):
    body = {"model": "echo", "prompt": "0123456789", **fields}
    return parse(ENGINE, "text", json.dumps(body).encode()).requests[0].hints


def chat(messages, **fields):
    body = {"model": "echo", "messages": messages, **fields}
    return parse(ENGINE, "chat", json.dumps(body).encode()).requests[0]


def part(text, **marks):
    return {"type": "text", "text": text, **marks}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, NO_HINTS),
        ({"prompt_cache_key": "manual-7"}, Hints(prompt_cache_key="manual-7")),
        ({"prompt_cache_retention": "24h"}, Hints(ttl_s=86400.0)),
        ({"prompt_cache_retention": "in_memory"}, Hints(ttl_s=300.0)),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, Hints(ttl_s=1800.0)),
        ({"prompt_cache_options": {"mode": "explicit"}}, Hints(cacheable=False)),
        (MARK, Hints(ttl_s=300.0, num_stable_tokens=10)),
        ({**HOUR, "stable_prefix_tokens": 4}, Hints(ttl_s=3600.0, num_stable_tokens=4)),
        ({"stable_prefix_tokens": 0}, Hints(num_stable_tokens=0)),
        ({"kv_transfer_params": {"max_offload_tokens": 0}}, Hints(max_offload_tokens=0)),
        ({"kv_transfer_params": {}}, NO_HINTS),
        ({"cache": {"no-store": True}}, Hints(cacheable=False)),
        ({"cache": {"no-store": False}}, NO_HINTS),
        ({"cache": None, "prompt_cache_key": None}, NO_HINTS),
        ({**MARK, "prompt_cache_retention": "24h"}, Hints(ttl_s=86400.0, num_stable_tokens=10)),
    ],
)
def test_fields(fields, expected):
    assert text_hints(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_cache_key": ""}, "has 0 characters"),
        ({"prompt_cache_key": 7}, "'prompt_cache_key' must be a string, not 7"),
        ({"prompt_cache_retention": "1h"}, "it may be in_memory, 24h"),
        ({"prompt_cache_retention": ["24h"]}, "it may be in_memory, 24h"),
        (
            {"prompt_cache_options": {"mode": "off"}},
            "'prompt_cache_options.mode' is \"off\"; it may",
        ),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "it may be 5m, 30m, 1h, 12h"),
        ({"cache_control": {}}, "'cache_control.type' is missing"),
        ({"cache_control": {"type": "for ever"}}, "it may be ephemeral"),
        ({"cache_control": "ephemeral"}, "must be an object"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "did you mean|leave it out"),
        ({"kv_transfer_params": {"max_offload_tokens": -1}}, "must lie from 0"),
        ({"stable_prefix_tokens": 1.5}, "must be an integer"),
        ({"cache": False}, "'cache' must be an object"),
        ({"cache": {"no-store": 1}}, "'cache.no-store' must be true or false"),
        ({"cache": {"no-cache": True}}, 'Unknown field "cache.no-cache"'),
    ],
)
def test_errors_say_what_to_change(fields, words):
    with pytest.raises(RequestError, match=words) as failed:
        text_hints(**fields)
    assert error_body(failed.value)["error"]["param"]


@pytest.mark.parametrize(
    ("parts", "stable", "ttl_s"),
    [
        ([part("a manual"), part("a question")], None, None),
        ([part("a manual", **MARK), part("a question")], "user: a manual\n", 300.0),
        ([part("a manual", **BREAKPOINT), part("a question")], "user: a manual\n", 1800.0),
        ([part("a", **HOUR), part("b", **MARK), part("c")], "user: a\nb\n", 3600.0),
        ([part("a"), part("b", **MARK)], "user: a\nb\n", 300.0),
    ],
)
def test_a_mark_on_a_part_says_how_far_a_prompt_is_stable(parts, stable, ttl_s):
    request = chat([{"role": "user", "content": parts}])
    expected = None if stable is None else len(stable)
    assert (request.hints.num_stable_tokens, request.hints.ttl_s) == (expected, ttl_s)
    plain = [{key: one[key] for key in ("type", "text")} for one in parts]
    assert request.prompt == chat([{"role": "user", "content": plain}]).prompt


def test_a_mark_on_a_message_is_at_its_end():
    messages = [{"role": "system", "content": "s", **MARK}, {"role": "user", "content": "u"}]
    hints = chat(messages).hints
    assert hints == Hints(ttl_s=300.0, num_stable_tokens=len("system: s\n"))
    assert chat(messages, prompt_cache_options={"mode": "explicit"}).hints.cacheable


def test_where_the_template_takes_no_such_chat_the_mark_has_only_its_time(monkeypatch):
    def refuse(messages, tools=()):
        if len(messages) < 2:
            raise RequestError("The template wants two.", "messages")
        return [1, 2, 3]

    monkeypatch.setattr(ENGINE, "encode_chat", refuse)
    messages = [{"role": "system", "content": "s", **HOUR}, {"role": "user", "content": "u"}]
    assert chat(messages).hints == Hints(ttl_s=3600.0)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": [part("x", cache_control={"type": "none"})]}, r"content\[0\].cache_control"),
        ({"content": [part("x", prompt_cache_breakpoint={"mode": "implicit"})]}, "explicit"),
        ({"content": "x", "cache_control": {"ttl": "5m"}}, r"messages\[0\].cache_control.type"),
    ],
)
def test_wrong_marks(message, words):
    with pytest.raises(RequestError, match=words):
        chat([{"role": "user", **message}])
