"""What stands before every call: calls at once, sizes of bodies, and web pages that call from a browser."""

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpcgen.server.api_errors import ApiError, busy
from hpcgen.server.settings import Limits

_UPLOAD = ("POST", "/v1/files")


class Guard:
    """Middleware. Uploads have a limit of their own, see `upload`.

    Args:
        hosts: names that the header `Host` may have; None: any. A page that a browser shows can make the browser call a
            server on the loopback address, where no token keeps it out, under a name that leads here.
    """

    def __init__(self, app: ASGIApp, limits: Limits, hosts: Iterable[str] | None) -> None:
        self._app, self._limits = app, limits
        self._hosts = None if hosts is None else frozenset(hosts)
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._in_flight >= self._limits.in_flight:
            await busy("too many calls at once", 1).response(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope))
        if refusal is not None:
            await refusal.response(scope, receive, send)
            return
        self._in_flight += 1
        try:
            is_upload = (scope["method"], scope["path"].rstrip("/")) == _UPLOAD
            await self._app(scope, receive if is_upload else self._limited(receive), send)
        finally:
            self._in_flight -= 1

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._hosts is None:
            return None
        name = (
            headers.get("host", "").rsplit(":", 1)[0] if not headers.get("host", "").endswith("]") else headers["host"]
        )
        if name not in self._hosts:
            return ApiError(403, "call the server by the name localhost or a loopback address", "forbidden_host")
        if "origin" in headers:
            return ApiError(403, "web pages may not call a server that asks for no token", "forbidden_origin")
        return None

    def _limited(self, receive: Receive) -> Receive:
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limits.body_bytes:
                raise ApiError(413, f"the body is larger than {self._limits.body_bytes} bytes", "body_too_large")
            return message

        return limited
