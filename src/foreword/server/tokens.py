"""`/tokenize` and `/detokenize`, with vLLM's names: what a prompt becomes, without computing it.

Blocking: call them off the event loop.
"""

from typing import Any

from foreword.core.request import Engine
from foreword.server.errors import ApiError
from foreword.server.fields import Fields, parse_object, wrong_type
from foreword.server.openai import chat_prompt, check_model, text_prompt, token_ids
from foreword.server.tools import parse_tools

TOKENIZE = ("model", "prompt", "messages", "tools")
TOKENIZE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"add_special_tokens": (True,)}
DETOKENIZE = ("model", "tokens")


def tokenize(engine: Engine, raw: bytes) -> dict[str, Any]:
    """Token ids of `prompt`, or of `messages` (and `tools`) as a chat renders them."""
    fields = Fields(parse_object(raw))
    fields.only(TOKENIZE, TOKENIZE_UNSUPPORTED)
    if "model" in fields:
        check_model(engine, fields.get("model"))
    if ("prompt" in fields) == ("messages" in fields):
        raise ApiError("Send either 'prompt' or 'messages'.", "prompt")
    if "messages" in fields:
        ids = chat_prompt(engine, fields, parse_tools(fields))
    else:
        if "tools" in fields:
            raise ApiError("'tools' needs 'messages'.", "tools")
        prompt = fields.get("prompt")
        if not isinstance(prompt, str):
            raise wrong_type("prompt", "a string", prompt)
        ids = text_prompt(engine, "prompt", prompt)
    return {"count": len(ids), "max_model_len": engine.card.max_model_len, "tokens": ids}


def detokenize(engine: Engine, raw: bytes) -> dict[str, Any]:
    """The text of `tokens`, special tokens included."""
    fields = Fields(parse_object(raw))
    fields.only(DETOKENIZE, {})
    if "model" in fields:
        check_model(engine, fields.get("model"))
    tokens = fields.required("tokens")
    if not isinstance(tokens, list):
        raise wrong_type("tokens", "a list of token ids", tokens)
    return {"prompt": engine.decode(token_ids(engine, "tokens", tokens))}
