"""OpenAI's request bodies as core Requests, or an error that says what to change.

Blocking, since it renders and tokenises: call it off the event loop.
"""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from foreword.core.request import Engine, Request, SamplingParams, ToolStyle
from foreword.server.errors import ApiError
from foreword.server.fields import Fields, parse_object, shown, wrong_type
from foreword.server.formats import response_grammar
from foreword.server.hints import FIELDS, Render, parse_hints
from foreword.server.messages import parse_messages
from foreword.server.tools import Tools, parse_tools, told

Kind = Literal["chat", "text"]

MAX_N = 128
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024  # each is looked for again after each token
MAX_SALT_CHARACTERS = 128
MAX_BIASES = 1024  # every one is applied again for each token
MAX_BIAS = 100
TOKEN_ID = "0|[1-9][0-9]{0,9}"  # as a key
MAX_TOP_LOGPROBS: dict[Kind, int] = {"chat": 20, "text": 5}
INT64_MAX = (1 << 63) - 1

# Each with its default, the least and the most.
NUMBERS: dict[str, tuple[float, float, float]] = {
    "temperature": (1.0, 0, 2),
    "top_p": (1.0, 0, 1),
    "min_p": (0.0, 0, 1),
    "presence_penalty": (0.0, -2, 2),
    "frequency_penalty": (0.0, -2, 2),
    "repetition_penalty": (1.0, 0.01, 100),
}
INTEGERS: dict[str, tuple[int | None, int, int]] = {
    "n": (1, 1, MAX_N),
    "max_tokens": (None, 1, INT64_MAX),
    "max_completion_tokens": (None, 1, INT64_MAX),
    "min_tokens": (0, 0, INT64_MAX),
    "top_k": (0, 0, INT64_MAX),
    "seed": (None, -INT64_MAX - 1, INT64_MAX),
    "prompt_logprobs": (None, 0, 20),
}

# What nothing depends on: `user` and its like name the sender, `metadata` is for stored answers.
IGNORED = ("user", "safety_identifier", "metadata")
COMMON = (
    *("model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "seed"),
    *("stop", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "cache_salt"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "prompt_logprobs"),
    *IGNORED,
    *FIELDS,
)
KNOWN: dict[Kind, tuple[str, ...]] = {
    "chat": (
        *(*COMMON, "messages", "max_completion_tokens", "top_logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format"),
    ),
    "text": (*COMMON, "prompt"),
}
# Fields of the API that this server does not have, with the values that ask for nothing.
UNSUPPORTED: dict[Kind, dict[str, tuple[Any, ...]]] = {
    "chat": {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "moderation": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "store": (False,),
        "service_tier": ("auto", "default"),
    },
    "text": {
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    },
}


@dataclass(frozen=True, slots=True)
class Call:
    """What the engine takes, a request for each prompt, and how their answer is to be written: the
    samples of the second prompt count on from those of the first."""

    kind: Kind
    model: str
    call_id: str
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    tools: Tools
    tool_style: ToolStyle


def parse(engine: Engine, kind: Kind, raw: bytes, tenant: str = "") -> Call:
    """Read a body. A tenant's cache is its own, whatever salts others send. Raises RequestError
    (mostly ApiError) for everything that cannot be served."""
    fields = Fields(parse_object(raw))
    fields.only(KNOWN[kind], UNSUPPORTED[kind])
    check_model(engine, fields.required("model"))
    stream = fields.boolean("stream")
    include_usage = _include_usage(fields, stream)
    n = fields.integer("n", *INTEGERS["n"]) or 1
    salt = fields.text("cache_salt", "", MAX_SALT_CHARACTERS)
    salt = f"{tenant}:{salt}" if tenant else salt
    asked = _max_tokens(fields)
    sampling = _sampling(engine, kind, fields)
    if stream and sampling["prompt_logprobs"] is not None:
        raise ApiError("'prompt_logprobs' come with a whole answer only.", "prompt_logprobs")
    style, tools = engine.card.tool_style or "tagged", Tools()
    render: Render | None = None
    if kind == "chat":
        tools = parse_tools(fields)
        sampling["grammar"] = _grammar(engine, fields, tools.grammar(style), sampling)
        prompts = [chat_prompt(engine, fields, tools)]
        render = partial(_rendered, engine, tools)
    else:
        prompts = _text_prompts(engine, fields, MAX_N // n)
    call_id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
    requests = []
    for at, prompt in enumerate(prompts):
        max_tokens = _within_context(engine, len(prompt), asked, kind)
        if sampling["min_tokens"] > max_tokens:
            raise ApiError(
                f"'min_tokens' is {sampling['min_tokens']}, more than the {max_tokens} tokens that "
                "the answer may have.",
                "min_tokens",
            )
        request_id = f"{call_id}-{at}" if len(prompts) > 1 else call_id
        params = SamplingParams(max_tokens, **sampling)
        hints = parse_hints(fields, prompt, render)
        requests.append(Request(request_id, tuple(prompt), params, n, salt, hints))
    return Call(
        kind, engine.card.name, call_id, tuple(requests), stream, include_usage, tools, style
    )


def check_model(engine: Engine, name: Any) -> None:
    if not isinstance(name, str):
        raise wrong_type("model", "a string", name)
    if name != engine.card.name:
        raise ApiError(
            f"The model {shown(name)} does not exist here; this server has '{engine.card.name}'.",
            "model",
            "model_not_found",
            404,
        )


def _include_usage(fields: Fields, stream: bool) -> bool:
    if "stream_options" not in fields:
        return False
    if not stream:
        raise ApiError("'stream_options' needs 'stream': true.", "stream_options")
    options = Fields(fields.object("stream_options"), "stream_options")
    options.only(("include_usage",), {"include_obfuscation": (False,)})
    return options.boolean("include_usage")


def _max_tokens(fields: Fields) -> int | None:
    """The number asked for. Its upper limit depends on the prompt: see `_within_context`."""
    old, new = (
        fields.integer(name, *INTEGERS[name]) for name in ("max_tokens", "max_completion_tokens")
    )
    if old is not None and new is not None and old != new:
        raise ApiError(
            f"'max_tokens' is {old} and 'max_completion_tokens' {new}: send one of them.",
            "max_tokens",
        )
    return old if new is None else new


def _within_context(engine: Engine, num_prompt: int, asked: int | None, kind: Kind) -> int:
    context = engine.card.max_model_len
    if num_prompt + (asked or 1) <= context:
        return asked or context - num_prompt
    wish = f"max_tokens is {asked}" if asked else "an answer needs 1"
    raise ApiError(
        f"The prompt has {num_prompt} tokens and {wish}: together {num_prompt + (asked or 1)}, "
        f"over this model's context of {context}. Shorten the prompt"
        f"{' or lower max_tokens' if asked and num_prompt < context else ''}.",
        "messages" if kind == "chat" else "prompt",
        "context_length_exceeded",
    )


_PARAMETERS = ("min_tokens", "top_k", "seed", "prompt_logprobs")  # integers


def _sampling(engine: Engine, kind: Kind, fields: Fields) -> dict[str, Any]:
    """Arguments of SamplingParams, without `max_tokens`."""
    return {
        **{name: fields.number(name, *limits) for name, limits in NUMBERS.items()},
        **{name: fields.integer(name, *INTEGERS[name]) for name in _PARAMETERS},
        "stop": _stop(fields),
        "logprobs": _logprobs(kind, fields),
        "logit_bias": _logit_bias(fields, engine.card.vocab_size),
        "ignore_eos": fields.boolean("ignore_eos"),
    }


def _logprobs(kind: Kind, fields: Fields) -> int | None:
    if kind == "text":
        return fields.integer("logprobs", None, 0, MAX_TOP_LOGPROBS["text"])
    wanted = fields.boolean("logprobs")
    num_top = fields.integer("top_logprobs", None, 0, MAX_TOP_LOGPROBS["chat"])
    if num_top is not None and not wanted:
        raise ApiError("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    return (num_top or 0) if wanted else None


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong_type("stop", "a string or a list of strings", value)
    if len(stops) > MAX_STOPS:
        raise ApiError(f"'stop' has {len(stops)} strings; at most {MAX_STOPS} are allowed.", "stop")
    if "" in stops:
        raise ApiError("'stop' holds an empty string: leave it out.", "stop")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARACTERS:
        raise ApiError(
            f"'stop' has a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are "
            "allowed.",
            "stop",
        )
    return tuple(stops)


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    table = fields.object("logit_bias")
    if len(table) > MAX_BIASES:
        raise ApiError(
            f"'logit_bias' has {len(table)} tokens; at most {MAX_BIASES} are allowed.", "logit_bias"
        )
    biases = Fields(table, "logit_bias")
    for key in table:
        if not re.fullmatch(TOKEN_ID, key) or int(key) >= vocab_size:
            raise ApiError(
                f"'logit_bias' has the key {shown(key)}; keys are token ids from 0 to "
                f"{vocab_size - 1}.",
                "logit_bias",
            )
    return {int(key): biases.number(key, 0.0, -MAX_BIAS, MAX_BIAS) for key in table}


def _text_prompts(engine: Engine, fields: Fields, num_max: int) -> list[list[int]]:
    prompt = fields.required("prompt")
    if not isinstance(prompt, list) or not any(isinstance(item, str | list) for item in prompt):
        return [text_prompt(engine, "prompt", prompt)]
    if len(prompt) > num_max:
        raise ApiError(
            f"'prompt' holds {len(prompt)} prompts; with this 'n' at most {num_max} are allowed.",
            "prompt",
        )
    return [text_prompt(engine, f"prompt[{at}]", item) for at, item in enumerate(prompt)]


def text_prompt(engine: Engine, path: str, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        ids = engine.encode(prompt)
    elif isinstance(prompt, list):
        ids = token_ids(engine, path, prompt)
    else:
        raise wrong_type(path, "a string or a list of token ids", prompt)
    if not ids:  # said here, before another prompt of the call has begun
        raise ApiError(f"'{path}' is empty: send at least one token.", path)
    return ids


def token_ids(engine: Engine, path: str, items: list[Any]) -> list[int]:
    """The same list, of ids that the model has."""
    vocab_size = engine.card.vocab_size
    for at, item in enumerate(items):
        if type(item) is not int:
            raise wrong_type(f"{path}[{at}]", "a token id", item)
        if not 0 <= item < vocab_size:
            raise ApiError(
                f"'{path}[{at}]' is {shown(item)}; token ids go from 0 to {vocab_size - 1}.",
                f"{path}[{at}]",
            )
    return items


def _grammar(engine: Engine, fields: Fields, call_grammar: str, sampling: Mapping[str, Any]) -> str:
    """What the answer must follow: a response format, or that it be a tool call."""
    grammar = response_grammar(fields)
    if grammar and call_grammar:
        raise ApiError(
            "'response_format' asks for JSON and 'tool_choice' for a call: send one of them.",
            "response_format",
        )
    grammar = grammar or call_grammar
    for name in ("ignore_eos", "min_tokens"):
        if grammar and sampling[name]:
            raise ApiError(f"An answer with a format has its own end: leave out '{name}'.", name)
    if grammar:
        engine.check_grammar(grammar)
    return grammar


def chat_prompt(engine: Engine, fields: Fields, tools: Tools) -> list[int]:
    return _rendered(engine, tools, fields.required("messages"))


def _rendered(engine: Engine, tools: Tools, chat: Any) -> list[int]:
    messages = parse_messages(chat)
    if engine.card.tool_style is None:
        return engine.encode_chat(told(messages, tools))
    return engine.encode_chat(messages, tools.definitions)
