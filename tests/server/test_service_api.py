import pytest
from starlette.testclient import TestClient

from hpcgen.server.access import Server
from hpcgen.server.app import build_app
from hpcgen.server.store import EngineState
from hpcgen.server.tokens import Tokens
from tests.server.conftest import ANNA, MakeServer, create, upload
from tests.server.requests import MODEL


def test_there_is_the_one_model(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == MODEL and client.get(f"/v1/models/{MODEL}").json() == model
    assert client.get("/v1/models/gpt-4o").status_code == 404


def test_metrics_count_batches_and_requests(client: TestClient, server: Server) -> None:
    batch = create(client, upload(client))
    create(client, upload(client))
    server.store.update_batch(batch["id"], ("validating",), status="completed", completed=3, failed=2)
    server.store.set_engine(EngineState(5.0, "decode", 7, 100, 200))
    lines = client.get("/metrics").text.splitlines()
    for expected in (
        'hpcgen_batches{status="completed"} 1.0',
        'hpcgen_batches{status="validating"} 1.0',
        'hpcgen_requests_total{outcome="completed"} 3.0',
        'hpcgen_requests_total{outcome="failed"} 2.0',
        "hpcgen_sequences 7.0",
        "hpcgen_decode_tokens_total 200.0",
    ):
        assert expected in lines


def test_health_needs_no_token_and_all_else_does(make_server: MakeServer) -> None:
    client = TestClient(build_app(make_server(tokens=Tokens({ANNA: "anna"}))))
    assert client.get("/health").json() == {"status": "ok"}
    for url in ("/metrics", "/v1/models", f"/v1/models/{MODEL}", "/v1/files", "/v1/batches", "/v1/files/x/content"):
        answer = client.get(url)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert client.get(url, headers={"Authorization": f"Bearer {ANNA}"}).status_code in (200, 404)


def test_what_goes_wrong_inside_is_said_without_details(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("secret /path")

    monkeypatch.setattr("hpcgen.server.store.Store.batch_counts", broken)
    answer = client.get("/metrics")
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"


def test_unknown_paths_and_methods_are_answered_in_the_apis_form(client: TestClient) -> None:
    assert client.get("/v1/chat/completions").json()["error"]["code"] == "not_found"
    assert client.put("/v1/files").json()["error"]["code"] == "method_not_allowed"
