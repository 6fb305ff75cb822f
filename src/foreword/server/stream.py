"""Carry outputs over HTTP: server-sent events, and cancelling when the client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from foreword.core.errors import EngineStopped, RequestFailed
from foreword.core.request import Output
from foreword.server.answer import Answer
from foreword.server.errors import error_body

T = TypeVar("T")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`. When the client leaves first, `work` is cancelled and ClientDisconnect
    raised. The request's body must have been read."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait({working, gone})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def merged(
    parts: Sequence[AsyncGenerator[Output, None]], n: int
) -> AsyncGenerator[Output, None]:
    """The outputs of several requests of `n` samples each, as they come. Their indexes count on
    from one request to the next. Closing closes all, and so does the first error."""
    queue: asyncio.Queue[Output | Exception | None] = asyncio.Queue()

    async def pump(number: int, part: AsyncGenerator[Output, None]) -> None:
        try:
            async with aclosing(part):
                async for output in part:
                    queue.put_nowait(replace(output, index=number * n + output.index))
            queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - whoever reads the queue raises it
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(number, part)) for number, part in enumerate(parts)]
    try:
        for _ in parts:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)


class EventStream(StreamingResponse):
    """The events of one answer. However it ends, even before it began, the outputs are closed:
    that cancels the request. The first output came before, so that a request which fails at once
    gets a proper status."""

    def __init__(
        self,
        first: Output,
        rest: AsyncGenerator[Output, None],
        answer: Answer,
        include_usage: bool,
    ) -> None:
        super().__init__(
            _events(first, rest, answer, include_usage),
            media_type="text/event-stream",
            # A proxy that gathered events would make a stream a whole answer (nginx's header).
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._outputs = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._outputs.aclose()


async def _events(
    first: Output, rest: AsyncGenerator[Output, None], answer: Answer, include_usage: bool
) -> AsyncGenerator[str, None]:
    yield _event(*answer.chunks(first))
    try:
        async for output in rest:
            yield _event(*answer.chunks(output))
    except (EngineStopped, RequestFailed) as error:
        yield _event(error_body(error))
        return
    if include_usage:
        yield _event(answer.usage_event())
    yield "data: [DONE]\n\n"


def _event(*bodies: dict[str, Any]) -> str:
    return "".join(
        f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
        for body in bodies
    )
