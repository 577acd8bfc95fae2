"""What a call may touch: the server's parts, seen as one owner."""

from dataclasses import dataclass

from fastapi import Request

from hpcgen.server.settings import Limits, Places
from hpcgen.server.store import Store
from hpcgen.server.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Server:
    """The parts that all calls share."""

    store: Store
    places: Places
    tokens: Tokens
    limits: Limits
    model: str
    """Its name in the API."""
    started: int
    """Unix time."""


@dataclass(frozen=True, slots=True)
class Access:
    server: Server
    owner: str

    @property
    def store(self) -> Store:
        return self.server.store


def get_access(request: Request) -> Access:
    """Of the token that came. Raises ApiError where there is none, or a wrong one."""
    server: Server = request.app.state.server
    return Access(server, server.tokens.owner(request.headers.get("authorization")))
