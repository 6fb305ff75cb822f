"""OpenAI's error shape."""

from typing import Any

from foreword.core.errors import EngineBusy, RequestError


class ApiError(RequestError):
    """A refusal with its HTTP `status`, and `code`: one word for programs."""

    def __init__(
        self, message: str, param: str | None = None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message, param)
        self.code = code
        self.status = status


def error_body(error: Exception) -> dict[str, Any]:
    """`{"error": ...}` for any exception; of one that is no refusal, the client is not to blame."""
    kind, param, code = "server_error", None, None
    if isinstance(error, RequestError):
        kind, param = "invalid_request_error", error.param
        code = error.code if isinstance(error, ApiError) else None
    elif isinstance(error, EngineBusy):
        kind, code = "rate_limit_error", "queue_full"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
