"""The HTTP application: routes, errors, and the description of the API in OpenAPI."""

import logging
import sqlite3
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from hpcgen import __version__
from hpcgen.server import batches_api, files_api, service_api
from hpcgen.server.access import Server
from hpcgen.server.api_errors import ApiError, error_body
from hpcgen.server.guard import Guard
from hpcgen.server.objects import ErrorResponse

_log = logging.getLogger(__name__)

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_ANY_CALL: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 408, 413, 429, 500, 503)
}


def build_app(server: Server, hosts: tuple[str, ...] | None = None) -> FastAPI:
    """The application over these parts.

    Args:
        hosts: see Guard; needed where there are no tokens.
    """
    app = FastAPI(
        title="hpcgen", version=__version__, responses=_ANY_CALL, redirect_slashes=False, docs_url=None, redoc_url=None
    )
    app.state.server = server
    for router in (files_api.router, batches_api.router, service_api.router):
        app.include_router(router)
    app.add_middleware(Guard, limits=server.limits, tokens=server.tokens, hosts=hosts)
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(sqlite3.OperationalError, _answer_unavailable)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_failure)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


async def _answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return JSONResponse(error_body(error.status_code, str(error.detail), code), error.status_code, error.headers)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """The first thing that is wrong, in OpenAI's form."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:]) or None
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    return JSONResponse(error_body(400, message, "invalid_value", place), 400)


async def _answer_unavailable(request: Request, error: Exception) -> Response:
    """The database is locked for long, or its disk is full."""
    _log.error("the state of the server cannot be used: %s", error)
    body = error_body(503, "the server cannot use its state; try again", "unavailable")
    return JSONResponse(body, 503, {"Retry-After": "30"})


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The client has gone in the middle of its body: nobody reads this, and it is no failure."""
    return JSONResponse(error_body(400, "the body is incomplete", "incomplete_body"), 400)


async def _answer_failure(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(500, "the server failed; its log says more", "internal_error"), 500)


def _describe(app: FastAPI) -> dict[str, Any]:
    """OpenAPI. Invalid parameters are answered with 400, not with FastAPI's 422."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if path != "/health":
                    operation["security"] = [{"bearer": []}]
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        schema["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema
