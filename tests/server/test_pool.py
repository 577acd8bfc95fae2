import json
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.report.events import read_events
from hpcgen.report.page import render_page
from hpcgen.report.run_record import RunRecord
from hpcgen.server.access import Server
from hpcgen.server.retention import remove_expired
from hpcgen.server.validation import Validator
from tests.server.conftest import create, upload
from tests.server.requests import input_file, line
from tests.server.scripted_engine import TestPool
from tests.tiny_tokenizer import VOCABULARY_SIZE, save_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCABULARY_SIZE}))
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture(scope="module")
def detokenizer(model: Path) -> Detokenizer:
    return Detokenizer.load(model)


@pytest.fixture
def pool(server: Server, model: Path, detokenizer: Detokenizer) -> TestPool:
    pool = TestPool(server, model, detokenizer)
    pool.now = time.time()
    return pool


def start(client: TestClient, server: Server, content: bytes, window: str = "24h") -> str:
    """A validated batch."""
    batch = create(client, upload(client, content), window)
    Validator(server).turn()
    return batch["id"]


def lines(client: TestClient, id: str | None) -> list[dict[str, Any]]:
    assert id is not None
    return [json.loads(text) for text in client.get(f"/v1/files/{id}/content").content.splitlines()]


def retrieve(client: TestClient, id: str) -> dict[str, Any]:
    return client.get(f"/v1/batches/{id}").json()


def test_a_batch_ends_with_outputs_in_the_inputs_order(client: TestClient, server: Server, pool: TestPool) -> None:
    content = b"".join(line(number, max_tokens=1 + (7 * number) % 5) for number in range(20))
    id = start(client, server, content)
    pool.until(id, "completed")
    batch = retrieve(client, id)
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert batch["error_file_id"] is None
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    output = lines(client, batch["output_file_id"])
    assert [entry["custom_id"] for entry in output] == [f"r{number}" for number in range(20)]
    assert len({entry["id"] for entry in output}) == 20
    file = client.get(f"/v1/files/{batch['output_file_id']}").json()
    assert file["purpose"] == "batch_output" and file["filename"] == f"{id}_output.jsonl"


def test_failed_requests_are_in_the_error_file_only(client: TestClient, server: Server, pool: TestPool) -> None:
    id = start(client, server, line(0) + line(1, temperature=9) + line(2, prompt=[5] * 300) + line(3))
    pool.until(id, "completed")
    batch = retrieve(client, id)
    assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
    assert [entry["custom_id"] for entry in lines(client, batch["output_file_id"])] == ["r0", "r3"]
    errors = lines(client, batch["error_file_id"])
    assert [(entry["custom_id"], entry["response"]["status_code"]) for entry in errors] == [("r1", 400), ("r2", 400)]


def test_there_is_no_output_file_when_none_succeeded(client: TestClient, server: Server, pool: TestPool) -> None:
    id = start(client, server, line(0, temperature=9))
    pool.until(id, "completed")
    batch = retrieve(client, id)
    assert batch["output_file_id"] is None and len(lines(client, batch["error_file_id"])) == 1
    assert len(list(server.places.files.iterdir())) == 2


def test_a_small_batch_does_not_wait_for_a_large_one(client: TestClient, server: Server, pool: TestPool) -> None:
    large = start(client, server, input_file(2000))
    pool.turns(3)
    small = start(client, server, input_file(3))
    assert pool.until(small, "completed") < 15
    assert retrieve(client, large)["status"] == "in_progress"
    assert len(pool.engine.order) < 500
    pool.until(large, "completed")


def test_batches_with_the_same_custom_ids_do_not_mix(client: TestClient, server: Server, pool: TestPool) -> None:
    ids = [start(client, server, input_file(10, n=samples)) for samples in (1, 2, 3)]
    for samples, id in enumerate(ids, 1):
        pool.until(id, "completed")
        output = lines(client, retrieve(client, id)["output_file_id"])
        assert [len(entry["response"]["body"]["choices"]) for entry in output] == [samples] * 10
    assert not pool.engine.running


def test_a_cancelled_batch_delivers_what_is_finished(client: TestClient, server: Server, pool: TestPool) -> None:
    content = input_file(5, max_tokens=1) + b"".join(line(number, max_tokens=200) for number in range(5, 10))
    id = start(client, server, content)
    pool.turns(6)
    assert client.post(f"/v1/batches/{id}/cancel").json()["status"] == "cancelling"
    pool.until(id, "cancelled")
    batch = retrieve(client, id)
    assert batch["cancelling_at"] <= batch["cancelled_at"]
    assert [entry["custom_id"] for entry in lines(client, batch["output_file_id"])] == [f"r{n}" for n in range(5)]
    errors = lines(client, batch["error_file_id"])
    assert [(entry["custom_id"], entry["response"], entry["error"]["code"]) for entry in errors] == [
        (f"r{number}", None, "batch_cancelled") for number in range(5, 10)
    ]
    assert len(pool.engine.cancelled) == 5 and not pool.engine.running


def test_a_batch_cancelled_before_it_began_has_no_files(client: TestClient, server: Server, pool: TestPool) -> None:
    id = create(client, upload(client))["id"]
    client.post(f"/v1/batches/{id}/cancel")
    pool.until(id, "cancelled")
    batch = retrieve(client, id)
    assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)


def test_what_is_finished_when_the_window_ends_is_delivered_and_the_rest_expires(
    client: TestClient, server: Server, pool: TestPool
) -> None:
    content = input_file(4, max_tokens=1) + b"".join(line(number, max_tokens=200) for number in range(4, 6))
    id = start(client, server, content, window="1h")
    pool.turns(5)
    assert retrieve(client, id)["status"] == "in_progress"
    pool.now += 3600
    pool.until(id, "expired")
    batch = retrieve(client, id)
    assert batch["expired_at"] and batch["completed_at"] is None
    assert len(lines(client, batch["output_file_id"])) == 4
    assert {entry["error"]["code"] for entry in lines(client, batch["error_file_id"])} == {"batch_expired"}


def test_a_restart_goes_on_and_runs_nothing_twice(
    client: TestClient, server: Server, pool: TestPool, model: Path, detokenizer: Detokenizer
) -> None:
    content = input_file(6, max_tokens=2) + b"".join(line(number, max_tokens=30) for number in range(6, 9))
    id = start(client, server, content)
    pool.turns(8)
    pool.pool.close()
    again = TestPool(server, model, detokenizer)
    again.now = pool.now
    again.until(id, "completed")
    assert len(again.engine.order) == 3
    assert [entry["custom_id"] for entry in lines(client, retrieve(client, id)["output_file_id"])] == [
        f"r{number}" for number in range(9)
    ]


def test_a_restart_goes_on_in_the_middle_of_a_sequence(
    client: TestClient, server: Server, pool: TestPool, model: Path, detokenizer: Detokenizer
) -> None:
    id = start(client, server, line(0, max_tokens=100) + line(1, max_tokens=40, n=3) + line(2, max_tokens=2))
    pool.turns(30)
    pool.pool.close()
    again = TestPool(server, model, detokenizer)
    again.now = pool.now
    assert again.until(id, "completed") < 80
    assert len(again.engine.order) == 4
    output = lines(client, retrieve(client, id)["output_file_id"])
    assert [entry["response"]["body"]["usage"]["completion_tokens"] for entry in output] == [100, 120, 2]
    events = [event["event"] for event in read_events(server.places.run(id) / "events.jsonl")]
    assert [name for name in events if name != "load"] == ["opened", "stopped", "opened", "restored", "finished"]


def test_after_a_kill_sequences_go_on_where_they_were_last_saved(
    client: TestClient, server: Server, model: Path, detokenizer: Detokenizer
) -> None:
    killed = TestPool(server, model, detokenizer, interval=10.0)
    killed.now = time.time()
    ids = [start(client, server, line(0, max_tokens=100)) for _ in range(2)]
    killed.turns(35)
    for active in killed.pool._active.values():
        active.opened.close()  # its locks are gone with a process
    again = TestPool(server, model, detokenizer)
    again.now = killed.now
    again.turns(3)
    assert all(30 <= len(sequence.output) <= 40 for sequence in again.engine.running.values())
    for id in ids:
        again.until(id, "completed")
        assert not list((server.places.run(id) / "checkpoints").iterdir())


def test_a_damaged_checkpoint_costs_work_and_no_result(
    client: TestClient, server: Server, pool: TestPool, model: Path, detokenizer: Detokenizer
) -> None:
    id = start(client, server, line(0, max_tokens=50))
    pool.turns(20)
    pool.pool.close()
    for file in (server.places.run(id) / "checkpoints").glob("*.h5"):
        file.write_bytes(b"damaged")
    again = TestPool(server, model, detokenizer)
    again.now = pool.now
    again.until(id, "completed")
    assert len(lines(client, retrieve(client, id)["output_file_id"])) == 1


def test_a_batch_of_the_server_has_a_report(client: TestClient, server: Server, pool: TestPool) -> None:
    id = start(client, server, input_file(4))
    pool.until(id, "completed")
    page = render_page(RunRecord.read(server.places.run(id)))
    assert "4 of 4 requests done" in page and "shared with other batches" in page


def test_the_run_directory_of_an_ended_batch_is_kept_as_long_as_a_file_of_it(
    client: TestClient, server: Server, pool: TestPool
) -> None:
    id = start(client, server, line(0) + line(1, temperature=9))
    waiting = create(client, upload(client))["id"]
    pool.until(id, "completed")
    batch = retrieve(client, id)
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        remove_expired(server.store, server.places)
        assert server.places.run(id).exists()
        client.delete(f"/v1/files/{batch[name]}")
    remove_expired(server.store, server.places)
    assert [path.name for path in server.places.batches.iterdir()] == [waiting]
    assert retrieve(client, id)["status"] == "completed"


@pytest.mark.parametrize("ending", ["completed", "expired"])
def test_an_end_that_was_cut_off_is_repeated_as_it_was(
    client: TestClient,
    server: Server,
    pool: TestPool,
    model: Path,
    detokenizer: Detokenizer,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    id = start(client, server, line(0, max_tokens=1) + line(1, max_tokens=3 if ending == "completed" else 200))
    pool.turns(3)
    if ending == "expired":
        pool.now += 86400
    with monkeypatch.context() as patch:
        patch.setattr(server.store, "deliver", lambda *arguments, **changes: (_ for _ in ()).throw(SystemExit))
        pool.until(id, "finalizing")
        pool.pool.close()
    again = TestPool(server, model, detokenizer)
    again.now = time.time()
    again.until(id, ending)
    batch = retrieve(client, id)
    assert batch["request_counts"]["completed"] == (2 if ending == "completed" else 1)
    assert not again.engine.order


def test_a_full_disk_at_the_end_is_tried_again(
    client: TestClient, server: Server, pool: TestPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = start(client, server, input_file(2))
    with monkeypatch.context() as patch:
        patch.setattr("hpcgen.batch.results.write_outputs", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "full")))
        pool.turns(12)
        assert retrieve(client, id)["status"] == "finalizing"
    pool.until(id, "completed")
    assert len(lines(client, retrieve(client, id)["output_file_id"])) == 2


def test_a_batch_of_another_configuration_fails_alone(
    client: TestClient, server: Server, pool: TestPool, model: Path, detokenizer: Detokenizer
) -> None:
    first = start(client, server, input_file(2, max_tokens=100))
    pool.turns(3)
    pool.pool.close()
    again = TestPool(server, model, detokenizer, seed=5)
    again.now = pool.now
    second = start(client, server, input_file(2))
    again.until(second, "completed")
    batch = retrieve(client, first)
    assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "batch_failed"
    assert str(server.places.root) not in json.dumps(batch)


def test_outputs_expire_as_the_batch_said(client: TestClient, server: Server, pool: TestPool) -> None:
    after = {"anchor": "created_at", "seconds": 3600}
    id = create(client, upload(client), output_expires_after=after)["id"]
    Validator(server).turn()
    pool.until(id, "completed")
    file = client.get(f"/v1/files/{retrieve(client, id)['output_file_id']}").json()
    assert file["expires_at"] == file["created_at"] + 3600


def test_metrics_tell_what_the_engine_does(client: TestClient, server: Server, pool: TestPool) -> None:
    start(client, server, input_file(5, max_tokens=100))
    pool.turns(3)
    assert "hpcgen_sequences 5.0" in client.get("/metrics").text
