"""Errors that cross rooms: each says what is wrong and what to change."""


class RequestError(ValueError):
    """A request that cannot be served as asked. `param` is the field to change, as the client
    named it; None when no single field is at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PinsFull(ValueError):
    """No more blocks may be pinned."""


class EngineStopped(RuntimeError):
    """The engine is draining or has failed; nothing was generated for this request."""


class EngineBusy(RuntimeError):
    """The queue is full; nothing was generated for this request. It may be sent again later."""


class RequestFailed(RuntimeError):
    """A fault of the engine that ended one request; others go on. The log says what it was."""
