"""Errors as the OpenAI API answers them: a status, and a body that clients of that API understand."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse


class ApiError(HTTPException):
    """An answer to a client that is an error."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code
        self.param = param

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(
            error_body(self.status_code, self.detail, self.code, self.param), self.status_code, self.headers
        )


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def not_found(kind: str, id: str) -> ApiError:
    """Nothing with this id, or nothing that the token may see: the two look the same."""
    return ApiError(404, f"No such {kind}: '{id[:100]}'", f"{kind}_not_found")


def busy(message: str, seconds: int) -> ApiError:
    """Nothing was admitted; the client may try again after `seconds`."""
    return ApiError(429, message, "rate_limit_exceeded", headers={"Retry-After": str(seconds)})
