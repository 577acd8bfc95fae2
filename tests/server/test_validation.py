from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hpcgen.batch.reader import BatchInput
from hpcgen.server.access import Server
from hpcgen.server.validation import MOST_ERRORS, Validator, validate
from tests.server.conftest import create, upload
from tests.server.requests import MODEL, input_file, line


def check(tmp_path: Path, content: bytes, most_requests: int = 100) -> list[tuple[str, int | None]]:
    path = tmp_path / "input.jsonl"
    path.write_bytes(content)
    errors = validate(BatchInput(path, 1000), "/v1/completions", MODEL, most_requests)
    return [(error["code"], error["line"]) for error in errors]


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"{broken\n", "invalid_json"),
        (b"\xff\xfe\n", "invalid_utf8"),
        (b"\n", "blank_line"),
        (b"\0" * 50 + b"\n", "invalid_json"),
        (line(0), "duplicate_custom_id"),
        (line(1).replace(b'"custom_id": "r1", ', b""), "missing_custom_id"),
        (line(1).replace(b'"r1"', b"5"), "invalid_request"),
        (line(1).replace(b"POST", b"GET"), "invalid_method"),
        (line(1, url="/v1/embeddings"), "invalid_url"),
        (b'{"custom_id": "r1", "method": "POST", "url": "/v1/completions"}\n', "missing_body"),
        (line(1, user="x" * 2000), "line_too_long"),
        (line(1, url="/v1/chat/completions", prompt=None), None),
        (line(1, model="gpt-4o"), "model_not_found"),
        (line(1, temperature=9), None),
        (line(1, unknown=9), None),
    ],
)
def test_a_fault_of_the_file_fails_the_batch_and_a_fault_of_a_body_does_not(
    tmp_path: Path, bad: bytes, code: str | None
) -> None:
    assert check(tmp_path, line(0) + bad + line(2)) == ([] if code is None else [(code, 2)])


def test_another_endpoint_than_the_batchs_is_a_fault(tmp_path: Path) -> None:
    chat = line(1, url="/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    chat = chat.replace(b'"prompt": [40, 41, 42], ', b"")
    assert check(tmp_path, line(0) + chat) == [("mismatched_endpoint", 2)]


def test_an_empty_and_a_too_large_file_fail(tmp_path: Path) -> None:
    assert check(tmp_path, b"") == [("empty_file", None)]
    assert check(tmp_path, input_file(5), most_requests=4) == [("too_many_requests", None)]


def test_the_list_of_errors_is_bounded(tmp_path: Path) -> None:
    assert len(check(tmp_path, b"x\n" * 500, most_requests=1000)) == MOST_ERRORS


def test_a_valid_batch_goes_in_progress_and_a_faulty_one_fails_with_its_errors(
    client: TestClient, server: Server
) -> None:
    good, bad = create(client, upload(client)), create(client, upload(client, line(0) + b"x\n"))
    Validator(server).turn()
    good, bad = (client.get(f"/v1/batches/{batch['id']}").json() for batch in (good, bad))
    assert good["status"] == "in_progress" and good["in_progress_at"] and good["request_counts"]["total"] == 3
    assert bad["status"] == "failed" and bad["failed_at"] and bad["output_file_id"] is None
    assert bad["errors"]["data"][0]["line"] == 2 and bad["errors"]["data"][0]["code"] == "invalid_json"


def test_a_batch_that_was_cancelled_meanwhile_stays_cancelled(client: TestClient, server: Server) -> None:
    batch = create(client, upload(client))
    client.post(f"/v1/batches/{batch['id']}/cancel")
    Validator(server).turn()
    assert client.get(f"/v1/batches/{batch['id']}").json()["status"] == "cancelling"


def test_a_small_batch_is_checked_before_a_large_one(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = create(client, upload(client, input_file(50))), create(client, upload(client, input_file(2)))
    checked: list[str] = []
    update = server.store.update_batch
    monkeypatch.setattr(server.store, "update_batch", lambda id, *a, **k: checked.append(id) or update(id, *a, **k))
    Validator(server).turn()
    assert checked == [small["id"], large["id"]]


def test_a_batch_that_cannot_be_checked_keeps_no_other_waiting(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = create(client, upload(client, input_file(1)))["id"]
    good = create(client, upload(client, input_file(2)))["id"]

    def fail_once(batch_input, *rest):  # type: ignore[no-untyped-def]
        if broken in str(batch_input.path):
            raise ZeroDivisionError("a mistake of ours")
        return []

    monkeypatch.setattr("hpcgen.server.validation.validate", fail_once)
    Validator(server).turn()
    found = client.get(f"/v1/batches/{broken}").json()
    assert found["status"] == "failed" and found["errors"]["data"][0]["code"] == "validation_failed"
    assert client.get(f"/v1/batches/{good}").json()["status"] == "in_progress"
