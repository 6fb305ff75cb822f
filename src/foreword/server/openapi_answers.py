"""What is answered, as JSON schemas."""

from typing import get_args

from foreword.core.request import FinishReason, ModelCard
from foreword.server.schema import (
    BOOLEAN,
    COUNT,
    NULL,
    STRING,
    Schema,
    answered,
    any_of,
    list_of,
    or_null,
    ref,
)

NUMBER: Schema = {"type": "number"}


_PROMPT: Schema = {
    "prompt_logprobs": list_of(
        or_null(
            {
                "type": "object",
                "additionalProperties": answered(logprob=NUMBER, decoded_token=STRING),
                "description": "By token id; null for the first token.",
            }
        )
    )
}


def answers(card: ModelCard) -> dict[str, Schema]:
    context = {"const": card.max_model_len, "description": "Tokens of prompt and answer."}
    fault = {"message": STRING, "type": STRING, "param": or_null(STRING), "code": or_null(STRING)}
    model = {"id": ref("ModelName"), "object": {"const": "model"}, "created": COUNT}
    return {
        **_chat(),
        **_text(),
        "Usage": _usage(),
        "Tokens": answered(count=COUNT, max_model_len=context, tokens=list_of(ref("TokenId"))),
        "Detokenized": answered(prompt=STRING),
        "Model": answered(**model, owned_by=STRING, max_model_len=context),
        "ModelList": answered(object={"const": "list"}, data=list_of(ref("Model"))),
        "Cleared": answered(cleared={"const": True}),
        **_worth(),
        "Health": answered(status={"const": "ok"}),
        "Error": answered(error=answered(**fault)),
    }


def _worth() -> dict[str, Schema]:
    by_place = {"type": "object", "additionalProperties": NUMBER}
    saved = {**or_null(NUMBER), "description": "Null before anything was computed."}
    outlook = {"hit_rate": NUMBER, "by_place": by_place, "saved_s_per_day": saved}
    times = {**NUMBER, "description": "Of the size that the place has."}
    size = {"place": STRING, "times": times, "blocks": COUNT, "bytes": COUNT}
    asked = {**NUMBER, "description": "Full blocks of prompts; old ones count less."}
    missed = {**NUMBER, "description": "At most so many came that are not counted."}
    worth = {
        "tenant": {**STRING, "description": "Digits of its key's and its salt's SHA-256."},
        "requests": NUMBER,
        "requests_missed": missed,
        **dict.fromkeys(("tokens_shared", "shared_prefix_tokens", "reuse_count"), NUMBER),
        "prefill_s_per_token": saved,
        "restore_bytes": NUMBER,
        "bytes_per_s": or_null(NUMBER),
        "eviction_penalty_s": NUMBER,
        "saved_s": saved,
        "worth_it": or_null(BOOLEAN),
        "held_bytes": by_place,
    }
    text = {**or_null(STRING), "description": "Its beginning; null where a salt was sent."}
    return {
        "WhatIf": answered(
            window_s=NUMBER,
            asked_blocks=asked,
            block_tokens=COUNT,
            sampled_1_in=COUNT,
            load_block_s={"type": "object", "additionalProperties": or_null(NUMBER)},
            now=answered(**outlook),
            rows=list_of(answered(**size, **outlook)),
        ),
        "Balance": answered(
            window_s=NUMBER,
            tenants=list_of(answered(**worth)),
            documents=list_of(answered(document=STRING, **worth)),
            segments=list_of(answered(start=COUNT, stop=COUNT, text=text, **worth)),
        ),
    }


def _usage() -> Schema:
    cached = {**COUNT, "description": "Tokens of the prompt that were not computed."}
    return answered(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=answered(cached_tokens=cached),
    )


def _head(kind: str) -> dict[str, Schema]:
    return {"id": STRING, "object": {"const": kind}, "created": COUNT, "model": ref("ModelName")}


def _chat() -> dict[str, Schema]:
    called = {
        "id": STRING,
        "type": {"const": "function"},
        "function": answered(name=STRING, arguments={**STRING, "description": "JSON."}),
    }
    role = {"const": "assistant"}
    said = or_null(STRING)
    calls = list_of(ref("ToolCall"), minItems=1)
    message = answered({"tool_calls": calls}, role=role, content=said, refusal=NULL)
    numbered = list_of(answered(index=COUNT, **called), minItems=1)
    delta = answered({"role": role, "content": STRING, "tool_calls": numbered})
    reason = {"enum": [*get_args(FinishReason), "tool_calls"]}
    choice = {"index": COUNT, "logprobs": any_of(ref("ChatLogprobs"), NULL)}
    token = {
        "token": STRING,
        "bytes": {**list_of({**COUNT, "maximum": 255}), "type": ["array", "null"]},
        "logprob": NUMBER,
    }
    tokens = answered(**token, top_logprobs=list_of(answered(**token)))
    return {
        "ChatAnswer": answered(
            **_head("chat.completion"),
            choices=list_of(answered(_PROMPT, **choice, message=message, finish_reason=reason)),
            usage=ref("Usage"),
        ),
        "ChatEvent": answered(
            {"usage": any_of(ref("Usage"), NULL)},
            **_head("chat.completion.chunk"),
            choices=list_of(answered(**choice, delta=delta, finish_reason=or_null(reason))),
        ),
        "ToolCall": answered(**called),
        "ChatLogprobs": answered(content=list_of(tokens), refusal=NULL),
    }


def _text() -> dict[str, Schema]:
    reason = {"enum": [*get_args(FinishReason)]}
    choice = {"index": COUNT, "text": STRING, "logprobs": any_of(ref("TextLogprobs"), NULL)}
    return {
        "TextAnswer": answered(
            **_head("text_completion"),
            choices=list_of(answered(_PROMPT, **choice, finish_reason=reason)),
            usage=ref("Usage"),
        ),
        "TextEvent": answered(
            {"usage": any_of(ref("Usage"), NULL)},
            **_head("text_completion"),
            choices=list_of(answered(**choice, finish_reason=or_null(reason))),
        ),
        "TextLogprobs": answered(
            tokens=list_of(STRING),
            token_logprobs=list_of(NUMBER),
            top_logprobs=list_of({"type": "object", "additionalProperties": NUMBER}),
            text_offset=list_of(COUNT),
        ),
    }
