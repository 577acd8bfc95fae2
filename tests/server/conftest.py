"""A server's parts in a directory of its own, and clients of its application."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hpcgen.server.access import Server
from hpcgen.server.app import build_app
from hpcgen.server.settings import Limits, Places
from hpcgen.server.store import Store
from hpcgen.server.tokens import Tokens
from tests.server.requests import MODEL, input_file

ANNA, BELA = "anna-anna-anna-anna", "bela-bela-bela-bela"
MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(tmp_path: Path) -> MakeServer:
    """Parts in the same directory each time: a second call is a restart."""

    def make(limits: Limits = Limits(), tokens: Tokens = Tokens({})) -> Server:  # noqa: B008
        places = Places(tmp_path / "server")
        places.make()
        return Server(Store(places.database), places, tokens, limits, MODEL, int(time.time()))

    return make


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    return make_server()


@pytest.fixture
def client(server: Server) -> TestClient:
    return TestClient(build_app(server), raise_server_exceptions=False)


def upload(client: TestClient, content: bytes | None = None, name: str = "in.jsonl", **options: Any) -> str:
    """The id of a new file."""
    content = input_file(3) if content is None else content
    answer = client.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, io.BytesIO(content))}, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def create(client: TestClient, file_id: str, window: str = "24h", **fields: Any) -> dict[str, Any]:
    """A new batch."""
    wanted = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": window, **fields}
    answer = client.post("/v1/batches", json=wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()
