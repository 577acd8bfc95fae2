import pytest
from starlette.testclient import TestClient

from hpcgen.server.access import Server
from hpcgen.server.app import build_app
from hpcgen.server.settings import Limits
from hpcgen.server.tokens import Tokens
from tests.server.conftest import ANNA, BELA, MakeServer, create, upload
from tests.server.requests import input_file


def test_a_new_batch_waits_for_validation_and_survives_the_deletion_of_its_file(
    client: TestClient, server: Server
) -> None:
    file = upload(client, input_file(3))
    batch = create(client, file, "30m", metadata={"name": "first"})
    assert batch["status"] == "validating" and batch["object"] == "batch"
    assert batch["expires_at"] == batch["created_at"] + 1800
    assert batch["metadata"] == {"name": "first"} and batch["errors"] is None
    assert batch["output_file_id"] is None and batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert client.get(f"/v1/batches/{batch['id']}").json() == batch
    client.delete(f"/v1/files/{file}")
    assert server.places.input(batch["id"]).read_bytes() == input_file(3)
    assert server.places.batch(batch["id"]).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "change",
    [
        {"completion_window": "24"},
        {"completion_window": "0h"},
        {"completion_window": "24h\n"},
        {"endpoint": "/v1/embeddings"},
        {"input_file_id": 5},
        {"metadata": {"a": "x" * 513}},
        {"metadata": {"x" * 65: "a"}},
        {"metadata": {str(number): "a" for number in range(17)}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
        {"unknown": 1},
    ],
)
def test_a_wrong_field_is_named(client: TestClient, change: dict) -> None:
    wanted = {"input_file_id": upload(client), "endpoint": "/v1/completions", "completion_window": "24h"} | change
    answer = client.post("/v1/batches", json=wanted)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] in change
    assert client.get("/v1/batches").json()["data"] == []


def test_an_unknown_file_or_an_output_is_no_input(client: TestClient) -> None:
    wanted = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert client.post("/v1/batches", json=wanted).status_code == 404


def test_a_full_server_answers_429_with_retry_after_and_admits_nothing(make_server: MakeServer) -> None:
    server = make_server(Limits(queued_batches=2, retry_after=17))
    client = TestClient(build_app(server))
    file = upload(client)
    create(client, file), create(client, file)
    wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = client.post("/v1/batches", json=wanted)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "17"
    assert len(client.get("/v1/batches").json()["data"]) == 2
    assert len(list(server.places.batches.iterdir())) == 2


def test_too_many_queued_requests_are_refused_and_a_large_batch_alone_is_not(make_server: MakeServer) -> None:
    client = TestClient(build_app(make_server(Limits(queued_requests=10))))
    large, small = upload(client, input_file(50)), upload(client, input_file(1))
    create(client, large)
    wanted = {"input_file_id": small, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert client.post("/v1/batches", json=wanted).status_code == 429


def test_lists_are_pages_with_cursors(client: TestClient) -> None:
    file = upload(client)
    ids = [create(client, file)["id"] for _ in range(4)]
    first = client.get("/v1/batches", params={"limit": 3}).json()
    assert [batch["id"] for batch in first["data"]] == ids[:0:-1] and first["has_more"]
    rest = client.get("/v1/batches", params={"after": first["last_id"]}).json()
    assert [batch["id"] for batch in rest["data"]] == ids[:1] and not rest["has_more"]
    assert client.get("/v1/batches", params={"after": "batch_none"}).status_code == 404


def test_cancelling_is_asked_for_once_and_never_of_what_has_ended(client: TestClient, server: Server) -> None:
    batch = create(client, upload(client))
    url = f"/v1/batches/{batch['id']}/cancel"
    cancelled = client.post(url).json()
    assert cancelled["status"] == "cancelling" and cancelled["cancelling_at"]
    assert client.post(url).json() == cancelled
    server.store.update_batch(batch["id"], ("cancelling",), status="completed")
    refused = client.post(url)
    assert refused.status_code == 409 and "completed" in refused.json()["error"]["message"]
    assert client.post("/v1/batches/batch_none/cancel").status_code == 404


def test_tokens_do_not_see_each_others_batches(make_server: MakeServer) -> None:
    server = make_server(tokens=Tokens({ANNA: "anna", BELA: "bela"}))
    anna, bela = (TestClient(build_app(server), headers={"Authorization": f"Bearer {token}"}) for token in (ANNA, BELA))
    file = upload(anna)
    id = create(anna, file)["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert bela.post("/v1/batches", json=wanted).status_code == 404
    assert bela.get(f"/v1/batches/{id}").status_code == 404
    assert bela.post(f"/v1/batches/{id}/cancel").status_code == 404
    assert bela.get("/v1/batches").json()["data"] == []
    assert bela.get("/v1/batches", params={"after": id}).status_code == 404
    assert anna.get(f"/v1/batches/{id}").json()["status"] == "validating"
