"""`/openapi.json`: the routes, what they take and what they answer, as OpenAPI 3.1."""

from collections.abc import Mapping
from typing import Any

from foreword import __version__
from foreword.core.request import ModelCard
from foreword.server.metrics import CONTENT_TYPE
from foreword.server.openapi_answers import answers
from foreword.server.openapi_bodies import bodies
from foreword.server.schema import COUNT, STRING, Schema, answered, any_of, ref

STREAM_TYPE = "text/event-stream"
ERRORS = {
    400: "A field is missing, unknown, not supported, of a wrong type or out of range; the body is "
    "not JSON; or prompt and answer exceed the context.",
    401: "An API key is missing or not known, on a server that asks for keys.",
    404: "Another model's name, or no such route.",
    405: "No such method on the route.",
    408: "The body took too long to come.",
    409: "Requests are running, and they hold what they reuse.",
    413: "The body is too large.",
    429: "The queue is full, or many large bodies come at once: try again later.",
    500: "The engine failed at this request; its log says why.",
    503: "The engine stops or has stopped: another server may take the request.",
}
_READS = (400, 401, 404, 408, 413, 429)  # what any route with a body may say


def page(card: ModelCard, asks_for_key: bool) -> Schema:
    """The document of a server with this model."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Foreword",
            "version": __version__,
            "description": "OpenAI's API over one model. In a body, a field that is null counts "
            "as absent, a field that is not listed is refused, and an integer has no fraction: 1, "
            "not 1.0. Any other route or method answers 404 or 405 with an Error.",
        },
        "paths": _paths(asks_for_key),
        "components": {
            "schemas": {**bodies(card), **answers(card)},
            "responses": {str(status): _error(status) for status in ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths(asks_for_key: bool) -> Schema:
    guard: Schema = {"security": [{"key": []}]} if asks_for_key else {}
    name = {"name": "name", "in": "path", "required": True, "schema": ref("ModelName")}
    stopped = {
        "description": "The engine has stopped.",
        "content": _json(answered(status={"const": "stopped"})),
    }
    metrics = {"description": "Counts for Prometheus.", "content": {CONTENT_TYPE: _of(STRING)}}
    calls = {
        "/v1/chat/completions": _call("Answer a chat", "Chat", guard),
        "/v1/completions": _call("Continue texts or token ids", "Text", guard),
        "/tokenize": _post("Token ids of a prompt or of messages", "Tokenize", "Tokens", guard),
        "/detokenize": _post("Text of token ids", "Detokenize", "Detokenized", guard),
    }
    model, models = _answer("Model"), _answer("ModelList")
    health = {"200": _answer("Health"), "503": stopped}
    cleared = {
        "summary": "Forget all known prefixes",
        **guard,
        "responses": {"200": _answer("Cleared"), **_errors(401, 409, 503)},
    }
    document = {"description": "This document.", "content": _json({"type": "object"})}
    return {
        **{path: {"post": operation} for path, operation in calls.items()},
        "/cache/clear": {"post": cleared},
        "/cache/whatif": _get(
            "What other sizes of cache would find",
            {"200": _answer("WhatIf"), **_errors(401)},
            guard,
        ),
        "/cache/worth": _get(
            "Whom the cache serves, and whether it is worth it",
            {"200": _answer("Balance"), **_errors(401)},
            guard,
        ),
        "/v1/models": _get("The served model, in a list", {"200": models, **_errors(401)}, guard),
        "/v1/models/{name}": {
            "parameters": [name],
            **_get("The served model", {"200": model, **_errors(401, 404)}, guard),
        },
        "/health": _get("Whether the engine serves", health),
        "/metrics": _get("Counts and latencies", {"200": metrics}),
        "/openapi.json": _get("This document", {"200": document}),
    }


def _get(summary: str, responses: Schema, guard: Mapping[str, Any] | None = None) -> Schema:
    return {"get": {"summary": summary, **(guard or {}), "responses": responses}}


def _post(summary: str, body: str, answer: str, guard: Mapping[str, Any]) -> Schema:
    return {
        "summary": summary,
        **guard,
        "requestBody": {"required": True, "content": _json(ref(body))},
        "responses": {"200": _answer(answer), **_errors(*_READS)},
    }


def _call(summary: str, name: str, guard: Mapping[str, Any]) -> Schema:
    operation = _post(summary, f"{name}Request", f"{name}Answer", guard)
    part = {
        **STRING,
        "contentMediaType": "application/json",
        "contentSchema": any_of(ref(f"{name}Event"), ref("Error")),
    }
    event = {
        **answered(data=any_of({"const": "[DONE]"}, part)),
        "description": "One event, with 'stream': true. The last one's data are [DONE]; a stream "
        "that fails after it began ends with an Error instead.",
    }
    operation["responses"]["200"]["content"][STREAM_TYPE] = _of(event)
    operation["responses"] |= _errors(500, 503)
    return operation


def _error(status: int) -> Schema:
    response: Schema = {"description": ERRORS[status], "content": _json(ref("Error"))}
    if status == 405:
        response["headers"] = {"Allow": {"description": "Methods it has.", **_of(STRING)}}
    if status == 429:
        response["headers"] = {"Retry-After": {"description": "Seconds.", **_of(COUNT)}}
    return response


def _errors(*statuses: int) -> Schema:
    return {
        str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)
    }


def _of(schema: Schema) -> Schema:
    return {"schema": schema}


def _json(schema: Schema) -> Schema:
    return {"application/json": _of(schema)}


def _answer(name: str) -> Schema:
    return {"description": "The answer.", "content": _json(ref(name))}
