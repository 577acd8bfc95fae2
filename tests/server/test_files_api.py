import os

import anyio
import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from hpcgen.server.access import Server
from hpcgen.server.app import build_app
from hpcgen.server.settings import Limits
from hpcgen.server.tokens import Tokens
from tests.server.conftest import ANNA, BELA, MakeServer, upload
from tests.server.requests import input_file

BOUNDARY = "xxBOUNDARYxx"


def form(*parts: tuple[str, bytes], end: bool = True) -> bytes:
    """A multipart body, with these headers of Content-Disposition and contents."""
    pieces = [
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + content + b"\r\n"
        for disposition, content in parts
    ]
    return b"".join(pieces) + (f"--{BOUNDARY}--\r\n".encode() if end else b"")


def post(client: TestClient, body: bytes) -> "tuple[int, dict]":
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    answer = client.post("/v1/files", content=body, headers=headers)
    return answer.status_code, answer.json()


PURPOSE = ('name="purpose"', b"batch")


def test_a_file_comes_back_as_it_was_sent(client: TestClient, server: Server) -> None:
    content = os.urandom(3_000_000)
    id = upload(client, content, "data.jsonl")
    assert client.get(f"/v1/files/{id}/content").content == content
    file = client.get(f"/v1/files/{id}").json()
    assert (file["bytes"], file["filename"], file["purpose"]) == (len(content), "data.jsonl", "batch")
    stored = server.places.file(id)
    assert stored.stat().st_mode & 0o777 == 0o600
    assert server.places.root.stat().st_mode & 0o777 == 0o700


def test_ranges_of_a_file(client: TestClient) -> None:
    id = upload(client, b"0123456789")
    url = f"/v1/files/{id}/content"
    part = client.get(url, headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    assert client.get(url, headers={"Range": "bytes=-3"}).content == b"789"
    assert client.get(url, headers={"Range": "bytes=20-"}).status_code == 416


def test_the_order_of_the_forms_fields_does_not_matter(client: TestClient) -> None:
    status, _ = post(client, form(('name="file"; filename="a"', b"x"), PURPOSE))
    assert status == 200


@pytest.mark.parametrize("name", ["../../etc/passwd", "..\\..\\evil", "/abs/olute", "a\x00b\x07", "x" * 5000, ""])
def test_a_name_is_shown_and_never_a_path(client: TestClient, server: Server, name: str) -> None:
    body = form(PURPOSE, (f'name="file"; filename="{name}"', b"x"))
    status, file = post(client, body)
    if status == 200:
        assert "/" not in file["filename"] and "\\" not in file["filename"] and len(file["filename"]) <= 255
        assert {path.name for path in server.places.files.iterdir()} == {file["id"]}
    else:
        assert status == 400 and not list(server.places.files.iterdir())
    assert {path.name.partition(".")[0] for path in server.places.root.iterdir()} == {"batches", "files", "state"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (form(PURPOSE), 400),
        (form(('name="file"; filename="a"', b"x")), 400),
        (form(('name="purpose"', b"fine-tune"), ('name="file"; filename="a"', b"x")), 400),
        (form(PURPOSE, ('name="file"; filename="a"', b"x"), ('name="file"; filename="b"', b"y")), 400),
        (form(PURPOSE, ('name="file"; filename="a"', b"x" * 9000), end=False), 400),
        (form(PURPOSE, ('name="other"', b"x"), ('name="file"; filename="a"', b"x")), 400),
        (form(('name="purpose"', b"b" * 5000), ('name="file"; filename="a"', b"x")), 400),
        (form(PURPOSE, ('name="file"; filename="a"', b"x" * 20_001)), 413),
        (form(PURPOSE, *[('name="expires_after[anchor]"', b"x" * 1000)] * 100), 413),
        (b"nonsense", 400),
        (b"", 400),
    ],
)
def test_a_bad_form_is_refused_and_leaves_nothing(make_server: MakeServer, body: bytes, status: int) -> None:
    server = make_server(Limits(file_bytes=20_000))
    client = TestClient(build_app(server), raise_server_exceptions=False)
    answer = post(client, body)
    assert answer[0] == status and answer[1]["error"]["message"]
    assert not list(server.places.files.iterdir())
    assert client.get("/v1/files").json()["data"] == []


def test_another_content_type_is_refused(client: TestClient) -> None:
    answer = client.post("/v1/files", json={"purpose": "batch"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_content_type"


def test_a_full_disk_is_said_and_leaves_nothing(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcgen.server.upload._write", full)
    status, answer = post(client, form(PURPOSE, ('name="file"; filename="a"', b"x")))
    assert status == 507 and "No space left" in answer["error"]["message"]
    assert not list(server.places.files.iterdir())


def test_a_file_may_expire(client: TestClient) -> None:
    part = ('name="file"; filename="a"', b"x")
    anchor, seconds = ('name="expires_after[anchor]"', b"created_at"), ('name="expires_after[seconds]"', b"3600")
    _, file = post(client, form(PURPOSE, anchor, seconds, part))
    assert file["expires_at"] == file["created_at"] + 3600
    assert post(client, form(PURPOSE, anchor, part))[0] == 400
    assert post(client, form(PURPOSE, anchor, ('name="expires_after[seconds]"', b"5"), part))[0] == 400


def test_deleting_a_file_frees_its_place(client: TestClient, server: Server) -> None:
    id = upload(client)
    assert client.delete(f"/v1/files/{id}").json() == {"id": id, "object": "file", "deleted": True}
    assert not list(server.places.files.iterdir())
    assert client.get(f"/v1/files/{id}").status_code == 404
    assert client.delete(f"/v1/files/{id}").status_code == 404


def test_lists_are_pages_with_cursors(client: TestClient) -> None:
    ids = [upload(client, name=f"{number}") for number in range(5)]
    first = client.get("/v1/files", params={"limit": 2}).json()
    assert [file["id"] for file in first["data"]] == ids[:2:-1] and first["has_more"]
    rest = client.get("/v1/files", params={"after": first["last_id"]}).json()
    assert [file["id"] for file in rest["data"]] == ids[2::-1] and not rest["has_more"]
    rising = client.get("/v1/files", params={"order": "asc", "purpose": "batch", "limit": 1}).json()
    assert rising["first_id"] == ids[0]
    assert client.get("/v1/files", params={"after": "file-none"}).status_code == 404
    assert client.get("/v1/files", params={"limit": 0}).status_code == 400


def test_a_token_has_so_many_files_at_most(make_server: MakeServer) -> None:
    server = make_server(Limits(files=2))
    client = TestClient(build_app(server))
    upload(client), upload(client)
    status, answer = post(client, form(PURPOSE, ('name="file"; filename="a"', b"x")))
    assert status == 403 and answer["error"]["code"] == "file_limit_exceeded"
    assert len(list(server.places.files.iterdir())) == 2


@pytest.mark.parametrize("id", ["..", "%2e%2e%2fstate.sqlite", "../state.sqlite", "file-x/../../state.sqlite", "%00"])
def test_an_id_is_never_a_path(client: TestClient, id: str) -> None:
    for url in (f"/v1/files/{id}/content", f"/v1/files/{id}"):
        assert client.get(url).status_code in (404, 405)
        assert client.delete(url).status_code in (404, 405)


def test_tokens_do_not_see_each_others_files(make_server: MakeServer) -> None:
    server = make_server(tokens=Tokens({ANNA: "anna", BELA: "bela"}))
    anna, bela = (TestClient(build_app(server), headers={"Authorization": f"Bearer {token}"}) for token in (ANNA, BELA))
    id = upload(anna, input_file(1))
    assert TestClient(build_app(server)).get(f"/v1/files/{id}").status_code == 401
    for answer in (bela.get(f"/v1/files/{id}"), bela.get(f"/v1/files/{id}/content"), bela.delete(f"/v1/files/{id}")):
        assert answer.status_code == 404
    assert bela.get("/v1/files").json()["data"] == []
    assert anna.get(f"/v1/files/{id}/content").content == input_file(1)


def test_a_client_that_goes_in_the_middle_leaves_nothing_and_is_no_failure(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    messages = iter([{"type": "http.request", "body": b"--x\r\n", "more_body": True}, {"type": "http.disconnect"}])
    answers = []

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        answers.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=x")]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "query_string": b"", "headers": headers}
    anyio.run(build_app(server), scope, receive, send)
    assert answers[0]["status"] == 400
    assert list(server.places.files.iterdir()) == [] and not caplog.records
