"""The API against its own description: schemathesis makes calls, valid and invalid ones, and checks every answer."""

import json
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import booleans
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from hpcgen.server.access import Access, Server
from hpcgen.server.app import build_app
from hpcgen.server.batches_api import admit, new_batch
from hpcgen.server.settings import Limits, Places
from hpcgen.server.store import Store, StoredFile
from hpcgen.server.tokens import Tokens
from tests.server.conftest import ANNA
from tests.server.requests import MODEL, input_file

KNOWN = {"file_id": "file-known", "batch_id": "batch_known", "model": MODEL}
"""Ids that exist: made-up ones reach no further than the search for them."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


CALLS = [
    ("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/{file_id}"), ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"), ("POST", "/v1/batches"), ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"), ("POST", "/v1/batches/{batch_id}/cancel"), ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"), ("GET", "/health"), ("GET", "/metrics"),
]  # fmt: skip


@pytest.fixture
def api(tmp_path: Path) -> schemathesis.BaseSchema:
    places = Places(tmp_path / "server")
    places.make()
    server = Server(Store(places.database), places, Tokens({ANNA: "anna"}), Limits(queued_batches=10), MODEL, 0)
    _fill(server)
    return schemathesis.openapi.from_asgi("/openapi.json", build_app(server))


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (*call, mode)
        for call in CALLS
        for mode in schemathesis.GenerationMode
        if mode.is_positive or call != ("GET", "/health")  # no call to it is wrong
    ],
)
def test_every_answer_is_as_the_description_says(
    api: schemathesis.BaseSchema, method: str, path: str, mode: schemathesis.GenerationMode
) -> None:
    @given(call=api[path][method].as_strategy(generation_mode=mode), known=booleans())
    @settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(call: schemathesis.Case, known: bool) -> None:
        for name, id in KNOWN.items() if known else ():
            if name in (call.path_parameters or {}):
                call.path_parameters[name] = id
        if known and mode.is_positive and isinstance(call.body, dict) and "input_file_id" in call.body:
            call.body["input_file_id"] = KNOWN["file_id"]
        # Unknown parameters of a query are left alone, as OpenAI does; what is sent in a body must all be right.
        checks = [*CHECKS, negative_data_rejection] if method == "POST" else CHECKS
        call.call_and_validate(headers={"Authorization": f"Bearer {ANNA}"}, checks=checks)

    check()


def test_the_description_names_every_route_and_no_422(api: schemathesis.BaseSchema) -> None:
    raw = api.raw_schema
    routes = {(method.upper(), path) for path, operations in raw["paths"].items() for method in operations}
    assert routes == set(CALLS)
    assert "422" not in json.dumps(raw)


def _fill(server: Server) -> None:
    content = input_file(3)
    file = StoredFile(
        id=KNOWN["file_id"], owner="anna", filename="f", purpose="batch", bytes=len(content), lines=3, created_at=5
    )
    server.places.file(file.id).write_bytes(content)
    server.store.add_file(file)
    batch = new_batch("anna", file, "/v1/completions", "24h")
    admit(Access(server, "anna"), batch)
    with server.store._changing() as connection:
        connection.execute("UPDATE batches SET id = ?", (KNOWN["batch_id"],))
