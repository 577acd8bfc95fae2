"""What stands before every call: tokens, calls at once, sizes of bodies, and web pages that call from a browser."""

import asyncio
import time
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpcgen.server.api_errors import ApiError, busy
from hpcgen.server.settings import Limits
from hpcgen.server.tokens import Tokens

_UPLOAD = ("POST", "/v1/files")
_WITHOUT_TOKEN = ("/health", "/openapi.json")


class Guard:
    """Middleware. Who has no token gets no further than this; uploads have a limit of their own, see `upload`.

    Args:
        hosts: names that the header `Host` may have; None: any. A page that a browser shows can make the browser call a
            server on the loopback address, where no token keeps it out, under a name that leads here.
    """

    def __init__(self, app: ASGIApp, limits: Limits, tokens: Tokens, hosts: Iterable[str] | None) -> None:
        self._app, self._limits, self._tokens = app, limits, tokens
        self._hosts = None if hosts is None else frozenset(hosts)
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        self._in_flight += 1
        try:
            await self._app(scope, self._limited(scope, receive), send)
        finally:
            self._in_flight -= 1

    def _check(self, path: str, headers: Headers) -> None:
        """Raises ApiError where the call is refused unread."""
        if path not in _WITHOUT_TOKEN:
            self._tokens.owner(headers.get("authorization"))
        if self._in_flight >= self._limits.in_flight:
            raise busy("too many calls at once", 1)
        if self._hosts is None:
            return
        host = headers.get("host", "")
        if (host if host.endswith("]") else host.rsplit(":", 1)[0]) not in self._hosts:
            raise ApiError(403, "call the server by the name localhost or a loopback address", "forbidden_host")
        if "origin" in headers:
            raise ApiError(403, "web pages may not call a server that asks for no token", "forbidden_origin")

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """`receive`, as long as the body is not too large and keeps coming."""
        most = None if (scope["method"], scope["path"]) == _UPLOAD else self._limits.body_bytes
        received, complete, begun = 0, False, time.monotonic()

        async def limited() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._limits.idle_seconds)
            except asyncio.TimeoutError:  # another type before Python 3.11
                raise ApiError(408, "the body does not come", "timeout") from None
            complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            seconds = time.monotonic() - begun
            if seconds > self._limits.idle_seconds and received < seconds * self._limits.least_rate and not complete:
                raise ApiError(408, "the body comes too slowly", "timeout")
            if most is not None and received > most:
                raise ApiError(413, f"the body is larger than {most} bytes", "body_too_large")
            return message

        return limited
