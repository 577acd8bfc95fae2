import asyncio

import pytest
from starlette.testclient import TestClient

from hpcgen.server.app import LOOPBACK_NAMES, build_app
from hpcgen.server.guard import Guard
from hpcgen.server.settings import Limits
from hpcgen.server.tokens import Tokens
from tests.server.conftest import ANNA, MakeServer


def test_a_large_body_is_refused_before_it_is_read(make_server: MakeServer) -> None:
    client = TestClient(build_app(make_server(Limits(body_bytes=1000))))
    answer = client.post("/v1/batches", content=b'{"input_file_id": "' + b"x" * 5000)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]"])
def test_loopback_names_are_let_in(make_server: MakeServer, host: str) -> None:
    client = TestClient(build_app(make_server(), LOOPBACK_NAMES))
    assert client.get("/v1/files", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Host": ""}, {"Origin": "http://evil.example"}])
def test_a_web_page_cannot_call_a_server_without_tokens(make_server: MakeServer, headers: dict) -> None:
    client = TestClient(build_app(make_server(), LOOPBACK_NAMES))
    answer = client.post("/v1/files", headers={"Host": "localhost"} | headers, data={"purpose": "batch"})
    assert answer.status_code == 403


def test_calls_beyond_the_limit_are_told_to_come_again() -> None:
    async def scenario() -> list[int]:
        release = asyncio.Event()

        async def slow(scope: object, receive: object, send: object) -> None:
            await release.wait()

        guard = Guard(slow, Limits(in_flight=2), Tokens({}), None)  # type: ignore[arg-type]
        statuses: list[int] = []

        async def send(message: dict) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                assert (b"retry-after", b"1") in message["headers"]

        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        calls = [asyncio.ensure_future(guard(scope, None, send)) for _ in range(3)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert [call.done() for call in calls] == [False, False, True]
        release.set()
        await asyncio.gather(*calls)
        await guard(scope, None, send)  # type: ignore[arg-type]
        return statuses

    assert asyncio.run(scenario()) == [429]


def call(guard: Guard, path: str, messages: list[dict], headers: "list[tuple[bytes, bytes]] | None" = None) -> int:
    """The status that a call is answered with; after `messages` nothing more comes from the client."""

    async def scenario() -> int:
        statuses: list[int] = []

        async def receive() -> dict:
            return messages.pop(0) if messages else await asyncio.sleep(3600, {})

        async def send(message: dict) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": headers or [], "http_version": "1.1", "scheme": "http", "server": ("x", 1)}  # fmt: skip
        await guard(scope, receive, send)  # type: ignore[arg-type]
        return statuses[0]

    return asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/files"])
def test_a_client_that_stops_sending_is_not_waited_for(make_server: MakeServer, path: str) -> None:
    server = make_server(Limits(idle_seconds=0.05))
    head = [(b"content-type", b"multipart/form-data; boundary=x" if "files" in path else b"application/json")]
    half = [{"type": "http.request", "body": b"--x\r\n", "more_body": True}]
    assert call(build_app(server), path, half, head) == 408  # type: ignore[arg-type]
    assert not list(server.places.files.iterdir())


def test_without_a_token_no_body_is_read_and_no_place_is_taken(make_server: MakeServer) -> None:
    app = build_app(make_server(Limits(in_flight=0), tokens=Tokens({ANNA: "anna"})))
    assert call(app, "/v1/files", []) == 401  # type: ignore[arg-type]
    assert call(app, "/v1/files", [], [(b"authorization", f"Bearer {ANNA}".encode())]) == 429  # type: ignore[arg-type]


def test_a_client_that_drips_is_waited_for_as_little(make_server: MakeServer) -> None:
    begin = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    drops = [{"type": "http.request", "body": body, "more_body": True} for body in (begin, *[b"-"] * 20_000)]
    head = [(b"content-type", b"multipart/form-data; boundary=x")]
    for rate, status in ((10**12, 408), (1, 400)):
        app = build_app(make_server(Limits(idle_seconds=0.01, least_rate=rate)))
        end = {"type": "http.request", "body": b"", "more_body": False}
        assert call(app, "/v1/files", [*drops, end], head) == status  # type: ignore[arg-type]
