"""Refusals: a status, and one sentence in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping

_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """What a client is told instead of an answer. ``param`` is the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The object that is sent."""
        return {
            "error": {
                "message": str(self),
                "type": _KINDS.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def bad(param: str, message: str) -> ApiError:
    """A field that cannot be served: 400. ``message`` goes on after the field's name."""
    return ApiError(400, f"{param}: {message}", param=param)
