"""OpenAI-compatible HTTP for anything that can `generate`: routes, statuses, health."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import lru_cache, partial
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from foreword.core import request as core
from foreword.core.errors import EngineBusy, EngineStopped, RequestError, RequestFailed
from foreword.server import worth
from foreword.server.answer import Answer
from foreword.server.bodies import Bodies
from foreword.server.errors import ApiError, error_body
from foreword.server.metrics import CONTENT_TYPE, exposition
from foreword.server.openai import Call, Kind, check_model, parse
from foreword.server.openapi import page
from foreword.server.stream import EventStream, merged, unless_gone
from foreword.server.tenants import Tenants
from foreword.server.tokens import detokenize, tokenize

RETRY_AFTER_S = 1
ROUTES = (
    "POST /v1/chat/completions, POST /v1/completions, POST /tokenize, POST /detokenize, "
    "POST /cache/clear, GET /cache/whatif, GET /cache/worth, GET /v1/models, GET /health, "
    "GET /metrics and GET /openapi.json"
)


class Api:
    """The endpoints over one engine. With `api_keys` each key is a tenant of its own."""

    def __init__(self, engine: core.Engine, api_keys: Sequence[str]) -> None:
        self._engine = engine
        self._tenants = Tenants(api_keys)
        self._bodies = Bodies()
        self._asks_for_key = bool(api_keys)
        self._decode = lru_cache(maxsize=1 << 16)(engine.decode)
        self._created = int(time.time())

    async def complete(self, request: Request, kind: Kind) -> Response:
        tenant = self._tenants.of(request.headers.get("authorization"))
        async with self._bodies.read(request) as raw:
            call = await asyncio.to_thread(parse, self._engine, kind, raw, tenant)
        answer = Answer(call, self._decode)
        outputs = self._outputs(call)
        if call.stream:
            first = await unless_gone(request, anext(outputs))
            return EventStream(first, outputs, answer, call.include_usage)
        await unless_gone(request, _gather(outputs, answer))
        return JSONResponse(answer.whole())

    async def _outputs(self, call: Call) -> AsyncGenerator[core.Output, None]:
        # The engine's promise is that closing cancels; what it returns may be any iterator.
        parts = [
            cast("AsyncGenerator[core.Output, None]", self._engine.generate(request))
            for request in call.requests
        ]
        async with aclosing(merged(parts, call.requests[0].n)) as outputs:
            async for output in outputs:
                yield output

    async def tokenize(self, request: Request) -> Response:
        self._tenants.of(request.headers.get("authorization"))
        async with self._bodies.read(request) as raw:
            return JSONResponse(await asyncio.to_thread(tokenize, self._engine, raw))

    async def detokenize(self, request: Request) -> Response:
        self._tenants.of(request.headers.get("authorization"))
        async with self._bodies.read(request) as raw:
            return JSONResponse(await asyncio.to_thread(detokenize, self._engine, raw))

    async def models(self, request: Request) -> Response:
        self._tenants.of(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._tenants.of(request.headers.get("authorization"))
        check_model(self._engine, request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        card = self._engine.card
        return {
            "id": card.name,
            "object": "model",
            "created": self._created,
            "owned_by": "foreword",
            "max_model_len": card.max_model_len,
        }

    async def clear_cache(self, request: Request) -> Response:
        self._tenants.of(request.headers.get("authorization"))
        if not await self._engine.clear_cache():
            message = "Requests are running, and they hold what they reuse: try again after them."
            raise ApiError(message, code="cache_in_use", status=409)
        return JSONResponse({"cleared": True})

    async def what_if(self, request: Request) -> Response:
        self._tenants.of(request.headers.get("authorization"))
        return JSONResponse(worth.what_if(await asyncio.to_thread(self._engine.value.what_if)))

    async def worth(self, request: Request) -> Response:
        tenant = self._tenants.of(request.headers.get("authorization"))
        found = await asyncio.to_thread(self._engine.value.balance, tenant)
        return JSONResponse(worth.balance(found, tenant, self._engine.decode))

    async def health(self, _request: Request) -> Response:
        if not self._engine.is_serving:
            return JSONResponse({"status": "stopped"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, _request: Request) -> Response:
        return Response(exposition(self._engine.stats), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, _request: Request) -> Response:
        return JSONResponse(page(self._engine.card, self._asks_for_key))


async def _gather(outputs: AsyncGenerator[core.Output, None], answer: Answer) -> None:
    async for output in outputs:
        answer.add(output)


async def _on_error(_request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nginx's word for it; nobody reads it
    if isinstance(error, EngineStopped):
        return JSONResponse(error_body(error), 503)
    if isinstance(error, EngineBusy):
        return JSONResponse(error_body(error), 429, {"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, RequestFailed):
        return JSONResponse(error_body(error), 500)
    return JSONResponse(error_body(error), error.status if isinstance(error, ApiError) else 400)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}. This server has {ROUTES}."
    code = "method_not_allowed" if error.status_code == 405 else "unknown_url"
    refusal = ApiError(message, code=code, status=error.status_code)
    return JSONResponse(error_body(refusal), refusal.status, headers=error.headers)


async def _on_bug(_request: Request, _error: Exception) -> Response:
    return JSONResponse(error_body(RuntimeError("The server failed; its log says why.")), 500)


def create_app(
    engine: core.Engine, api_keys: Sequence[str] = (), cors_origins: Sequence[str] = ()
) -> ASGIApp:
    """The ASGI application that serves `engine`. Starting and stopping it is the caller's.

    With `api_keys` every route but /health, /metrics and /openapi.json asks for one; pages of
    `cors_origins` ("*" for all) may call from a browser.
    """
    api = Api(engine, api_keys)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", partial(api.complete, kind="chat"), methods=["POST"]),
            Route("/v1/completions", partial(api.complete, kind="text"), methods=["POST"]),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/detokenize", api.detokenize, methods=["POST"]),
            Route("/cache/clear", api.clear_cache, methods=["POST"]),
            Route("/cache/whatif", api.what_if),
            Route("/cache/worth", api.worth),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/openapi.json", api.openapi),
        ],
        exception_handlers={
            RequestError: _on_error,
            EngineBusy: _on_error,
            EngineStopped: _on_error,
            RequestFailed: _on_error,
            ClientDisconnect: _on_error,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
    )
    if not cors_origins:
        return app
    return CORSMiddleware(app, cors_origins, allow_methods=["*"], allow_headers=["*"])
