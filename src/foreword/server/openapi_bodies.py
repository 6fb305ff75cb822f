"""What may be sent, as JSON schemas: names and limits are those of the modules that check them.

What one field asks of another is said in words: a body that follows its schema is served, or
refused for such a reason.
"""

from collections.abc import Mapping

from foreword.core.request import ModelCard
from foreword.server import hints, messages, openai, tokens
from foreword.server.openai import Kind
from foreword.server.schema import (
    COUNT,
    INTEGER,
    NULL,
    STRING,
    Schema,
    any_of,
    body,
    flag,
    limited,
    list_of,
    neutral_only,
    or_null,
    ref,
)
from foreword.server.tools import MAX_TOOLS, NAME

ABOUT = {
    "max_tokens": "Tokens that the answer may have; by default what is left of the context.",
    "max_completion_tokens": "The newer name of max_tokens; if both are sent they must agree.",
    "min_tokens": "Before these no end token comes and no stop string counts; at most max_tokens.",
    "prompt_logprobs": "Report the prompt's tokens too, with so many alternatives. Not in a "
    "stream; the prompt is computed, not reused.",
    "n": "Samples of each prompt, which is computed once.",
    "seed": "The same request with the same seed draws the same numbers; by default it is drawn.",
    "temperature": "0 always takes the most likely token.",
    "top_p": "Sample among the most likely tokens that have this probability together.",
    "top_k": "Sample among this many most likely tokens; 0 keeps all.",
    "min_p": "Leave out tokens less likely than this share of the most likely one.",
    "presence_penalty": "Off the logit of a token that was sampled already.",
    "frequency_penalty": "Off the logit of a token for each time that it was sampled.",
    "repetition_penalty": "Divides the logits of tokens of the prompt or the answer; 1 does "
    "nothing.",
}


def bodies(card: ModelCard) -> dict[str, Schema]:
    model = {"model": ref("ModelName")}
    optional_tools = {"tools": list_of(ref("Tool"), maxItems=MAX_TOOLS)}
    spare = neutral_only(tokens.TOKENIZE_UNSUPPORTED)
    return {
        "ModelName": {"type": "string", "enum": [card.name]},
        "TokenId": {**COUNT, "maximum": card.vocab_size - 1},
        "ChatRequest": _request("chat", card),
        "TextRequest": _request("text", card),
        "Message": any_of(*_messages()),
        "Tool": _tool(),
        "Tokenize": any_of(
            body({"prompt": _text()}, **model, **spare, messages=NULL, tools=NULL),
            body({"messages": _chat()}, **model, **spare, **optional_tools, prompt=NULL),
        ),
        "Detokenize": body({"tokens": list_of(ref("TokenId"))}, **model),
    }


def _request(kind: Kind, card: ModelCard) -> Schema:
    own = _chat_fields() if kind == "chat" else _text_fields()
    first = {"messages": _chat()} if kind == "chat" else {"prompt": _prompt()}
    ignored = {name: {"description": "Changes nothing."} for name in openai.IGNORED}
    neutral = neutral_only(openai.UNSUPPORTED[kind])
    required = {"model": ref("ModelName"), **first}
    needs = {"stream_options": "stream"} | ({"top_logprobs": "logprobs"} if kind == "chat" else {})
    return {
        **body(required, **_common_fields(kind, card), **own, **_hints(), **ignored, **neutral),
        "dependentSchemas": {name: _unless_null(name, other) for name, other in needs.items()},
    }


def _unless_null(name: str, needed: str) -> Schema:
    """Where `name` is there and not null, `needed` must be true."""
    return any_of(
        {"properties": {name: NULL}},
        {"properties": {needed: {"const": True}}, "required": [needed]},
    )


def _common_fields(kind: Kind, card: ModelCard) -> dict[str, Schema]:
    numbers = {
        name: {"type": "number", **limited(*limits, description=ABOUT[name])}
        for name, limits in openai.NUMBERS.items()
    }
    integers = {
        name: {**INTEGER, **limited(*limits, description=ABOUT[name])}
        for name, limits in openai.INTEGERS.items()
        if name in openai.KNOWN[kind]
    }
    for name in integers.keys() & {"max_tokens", "max_completion_tokens", "min_tokens"}:
        integers[name]["maximum"] = card.max_model_len - 1  # a prompt has a token or more
    bias = or_null({"type": "number", **limited(None, -openai.MAX_BIAS, openai.MAX_BIAS)})
    stop = {**STRING, "minLength": 1}
    options = {"include_usage": flag("End with an event that has the usage.")}
    return {
        **numbers,
        **integers,
        "stream": flag("Answer with events as the tokens come."),
        "stream_options": {
            **body({}, **options, **neutral_only({"include_obfuscation": (False,)})),
            "description": "Needs 'stream': true.",
        },
        "stop": any_of(
            stop,
            list_of(stop, maxItems=openai.MAX_STOPS),
            description="Texts that end the answer, which is left without them.",
        ),
        "logit_bias": {
            "type": "object",
            "patternProperties": {f"^({openai.TOKEN_ID})$": bias},
            "additionalProperties": False,
            "maxProperties": openai.MAX_BIASES,
            "description": f"Added to the logits of token ids, up to {card.vocab_size - 1}.",
        },
        "cache_salt": {
            **STRING,
            **{"minLength": 1, "maxLength": openai.MAX_SALT_CHARACTERS},
            "description": "Only requests with the same salt share computed prompts.",
        },
        "ignore_eos": flag("Go on after the end token, up to max_tokens."),
    }


def _hints() -> dict[str, Schema]:
    """None of them changes an answer."""
    count = {**COUNT, "maximum": hints.INT64_MAX}
    stable = {**count, "description": "Others start with so many of its tokens too, and no more."}
    most = {**count, "description": "Only so many leading tokens go below the device."}
    kept = {"enum": [*hints.RETENTIONS_S], "description": "in_memory: 5 minutes from its last use."}
    mode = {"enum": [*hints.MODES], "description": "explicit without a mark: nothing is kept."}
    return {
        "prompt_cache_key": {
            **STRING,
            **{"minLength": 1, "maxLength": hints.MAX_KEY_CHARACTERS},
            "description": "Names what prompts start with, a document say: what is reused of it "
            "is learnt apart.",
        },
        "prompt_cache_retention": kept,
        "prompt_cache_options": body({}, mode=mode, ttl=_ttl()),
        "stable_prefix_tokens": stable,
        "kv_transfer_params": body({}, max_offload_tokens=most),
        "cache": body({}, **{"no-store": flag("Nobody reuses what is computed for it.")}),
        "cache_control": _mark_fields()["cache_control"],
    }


def _mark_fields() -> dict[str, Schema]:
    said = "What comes before its end is asked for again, within the time."
    control = body({"type": {"const": "ephemeral"}}, ttl=_ttl())
    mark = body({}, mode={"enum": ["explicit"]}, ttl=_ttl())
    return {
        "cache_control": {**control, "description": said},
        "prompt_cache_breakpoint": {**mark, "description": said},
    }


def _ttl() -> Schema:
    return {"enum": [*hints.TTLS_S], "description": "From its last use."}


def _chat_fields() -> dict[str, Schema]:
    most = openai.MAX_TOP_LOGPROBS["chat"]
    named = body({"name": STRING})
    return {
        "logprobs": flag("Report each token's log-probability."),
        "top_logprobs": {
            **INTEGER,
            **limited(None, 0, most, description="Alternatives. Needs 'logprobs': true."),
        },
        "tools": {
            **list_of(ref("Tool"), maxItems=MAX_TOOLS),
            "description": "What the model may call. Send them in the same order each time.",
        },
        "tool_choice": any_of(
            {"enum": ["none", "auto", "required"]},
            body({"function": named}, type={"enum": ["function"]}),
            default="auto",
            description="With 'required' or a function (one of 'tools') the answer is a call.",
        ),
        "parallel_tool_calls": flag("May a forced answer hold several calls."),
        "response_format": any_of(
            body({"type": {"enum": ["text", "json_object"]}}),
            body({"type": {"const": "json_schema"}, "json_schema": _json_schema()}),
            description="What the answer must be, up to where max_tokens may cut it off. Not "
            "together with a forced call or 'ignore_eos'.",
        ),
    }


def _json_schema() -> Schema:
    schema = {"type": "object", "description": "A JSON schema."}
    words = flag("An answer follows its schema either way.")
    return body({"schema": schema}, name={}, description={}, strict=words)


def _text_fields() -> dict[str, Schema]:
    most = openai.MAX_TOP_LOGPROBS["text"]
    about = "Report each token's log-probability, with this many alternatives."
    return {"logprobs": {**INTEGER, **limited(None, 0, most, description=about)}}


def _text() -> Schema:
    return {**STRING, "examples": ["Once upon a time"]}


def _prompt() -> Schema:
    ids = list_of(ref("TokenId"), minItems=1)
    several = list_of(any_of(STRING, ids), minItems=1, maxItems=openai.MAX_N)
    about = (
        "A text, token ids, or a list of either; each has a token at least, and all together "
        f"have at most {openai.MAX_N} samples."
    )
    return {**any_of(_text(), ids, several, description=about), "examples": _text()["examples"]}


def _chat() -> Schema:
    example = [{"role": "user", "content": "Say hello."}]
    return {**list_of(ref("Message"), minItems=1), "examples": [example]}


def _messages() -> list[Schema]:
    """One for each kind of message; an assistant's may have calls and then needs no content."""
    part = body({"type": {"const": "text"}, "text": STRING}, **_mark_fields())
    content = any_of(STRING, list_of(part), description="Parts are joined by line breaks.")
    name = {**STRING, "minLength": 1, "maxLength": messages.MAX_NAME_CHARACTERS}
    call_id = {**STRING, "minLength": 1, "maxLength": messages.MAX_ID_CHARACTERS}
    city = '{"city": "Paris"}'
    arguments = {**STRING, "description": "An object, as JSON.", "examples": [city]}
    call = body(
        {"function": body({"name": name, "arguments": arguments})},
        id=call_id,
        index={**COUNT, "maximum": messages.CALL_INDEXES[-1]},
        **neutral_only({"type": ("function",)}),
    )

    def message(roles: list[str], required: Mapping[str, Schema], **optional: Schema) -> Schema:
        spare = neutral_only(messages.unsupported_fields(roles[0]))
        marks = _mark_fields()
        return body({"role": {"enum": roles}, **required}, name=name, **optional, **spare, **marks)

    plain = [role for role in messages.ROLES if role not in ("assistant", "tool")]
    return [
        message(plain, {"content": content}),
        message(["assistant"], {"content": content}, tool_calls=list_of(call)),
        message(["assistant"], {"tool_calls": list_of(call, minItems=1)}, content=content),
        message(["tool"], {"content": content, "tool_call_id": call_id}),
    ]


def _tool() -> Schema:
    name = {**STRING, "pattern": f"^{NAME.pattern}$"}
    parameters = {"type": "object", "description": "A JSON schema of the arguments."}
    function = body({"name": name}, description=STRING, parameters=parameters, strict={})
    return body({"type": {"const": "function"}, "function": function})
