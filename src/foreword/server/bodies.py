"""Read requests' bodies within bounds: of one, of the time it takes, and of all together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from foreword.core.errors import EngineBusy
from foreword.server.errors import ApiError

BODY_BYTES_MAX = 32 << 20
BODY_S_MAX = 60.0  # to send a body
BODIES_BYTES_MAX = 128 << 20  # of all that are being read or parsed; parsed they take several times


class Bodies:
    """The bodies of one server's requests, on its event loop."""

    def __init__(self) -> None:
        self._num_bytes = 0  # of all that are held

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body, which counts as held until the context ends. One that is too large, or for
        which there is no room, is read to its end and dropped on the way: a client that is still
        sending would not see the answer. Raises ApiError or EngineBusy."""
        raw = await self._whole(request)
        try:
            yield raw
        finally:
            self._num_bytes -= len(raw)

    async def _whole(self, request: Request) -> bytes:
        body, num_bytes, has_room = bytearray(), 0, True
        try:
            async with asyncio.timeout(BODY_S_MAX):
                async for chunk in request.stream():
                    num_bytes += len(chunk)
                    has_room = has_room and self._num_bytes + len(chunk) <= BODIES_BYTES_MAX
                    if has_room and num_bytes <= BODY_BYTES_MAX:
                        self._num_bytes += len(chunk)
                        body += chunk
                    else:
                        self._num_bytes -= len(body)
                        body.clear()
        except BaseException as error:
            self._num_bytes -= len(body)
            if isinstance(error, TimeoutError):
                message = f"The body did not come within {BODY_S_MAX:.0f} seconds."
                raise ApiError(message, code="body_too_slow", status=408) from error
            raise
        if num_bytes > BODY_BYTES_MAX:
            message = f"The body has {num_bytes} bytes; at most {BODY_BYTES_MAX} are read."
            raise ApiError(message, code="body_too_large", status=413)
        if not has_room:
            raise EngineBusy(
                f"Bodies of {BODIES_BYTES_MAX} bytes are being read at once, and this one is more."
            )
        return bytes(body)
