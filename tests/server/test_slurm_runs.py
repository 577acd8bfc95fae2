import json
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.journal import Journal
from hpcgen.batch.reader import BatchInput
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.jobs import slurm
from hpcgen.jobs.job_options import SlurmOptions
from hpcgen.jobs.submission import Submission, jobs_directory
from hpcgen.server.access import Server
from hpcgen.server.delivery import RunSettings
from hpcgen.server.slurm_runs import MOST_SUBMISSIONS, SlurmRuns
from hpcgen.server.validation import Validator
from tests.server.conftest import create, upload
from tests.server.requests import input_file
from tests.tiny_tokenizer import VOCABULARY_SIZE, save_tokenizer


class Cluster:
    """Slurm as far as the server sees it: jobs that the test moves from state to state."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Path, list[str]]] = []
        self.states: dict[str, str] = {}
        self.cancelled: list[str] = []
        self.silent = False

    def submit(self, options: SlurmOptions, run_directory: Path, arguments: list[str]) -> Submission:
        self.submitted.append((run_directory, arguments))
        id = str(100 + len(self.submitted))
        self.states[id] = "PENDING"
        record = Submission(id, [], time.time(), arguments, {})
        jobs_directory(run_directory).mkdir(exist_ok=True)
        content = {"job_id": id, "instances": [], "submitted": record.submitted, "arguments": arguments, "slurm": {}}
        (jobs_directory(run_directory) / f"submission-{id}.json").write_text(json.dumps(content))
        return record

    def jobs(self, id: str, timeout: float = 0) -> list[slurm.Job]:
        if self.silent:
            raise slurm.SlurmError("no answer")
        return slurm.parse_jobs(f"JobId={id} JobState={self.states[id]} Restarts=0") if id in self.states else []

    def cancel(self, id: str) -> None:
        self.cancelled.append(id)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr("hpcgen.server.slurm_runs.submit", cluster.submit)
    monkeypatch.setattr(slurm, "jobs", cluster.jobs)
    monkeypatch.setattr(slurm, "cancel", cluster.cancel)
    return cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCABULARY_SIZE}))
    return directory


@pytest.fixture
def runs(server: Server, cluster: Cluster, model: Path) -> SlurmRuns:
    settings = RunSettings(model, {}, 10, 2**20)
    return SlurmRuns(
        server.store, server.places, settings, SlurmOptions(), ["--seed", "1"], lambda: Detokenizer.load(model)
    )


@pytest.fixture
def batch(client: TestClient, server: Server) -> str:
    id = create(client, upload(client, input_file(3)))["id"]
    Validator(server).turn()
    return id


def work(server: Server, model: Path, batch: str, done: int) -> None:
    """What a job leaves that was ended after `done` requests."""
    batch_input = BatchInput(server.places.input(batch))
    with RunDirectory(server.places.run(batch)).open(batch_input, model, {"seed": 1, "sub_batch": 10}) as run:
        journal = Journal(run.journal_path, 3)
        for request in range(done):
            journal.append(request, True, json.dumps({"custom_id": f"r{request}"}).encode())
        journal.close()


def complete(server: Server, batch: str) -> None:
    directory = server.places.batch(batch)
    (directory / "results.jsonl").write_text('{"custom_id":"r0"}\n{"custom_id":"r2"}\n')
    (directory / "results.errors.jsonl").write_text('{"custom_id":"r1"}\n')
    (server.places.run(batch) / "SUCCESS").write_text('{"requests_ok": 2, "requests_failed": 1, "bct": 5}')


def retrieve(client: TestClient, id: str) -> dict[str, Any]:
    return client.get(f"/v1/batches/{id}").json()


def test_a_batch_becomes_one_submitted_run(
    client: TestClient, server: Server, cluster: Cluster, runs: SlurmRuns, model: Path, batch: str
) -> None:
    runs.turn()
    runs.turn()
    ((run, arguments),) = cluster.submitted
    assert run == server.places.run(batch)
    assert arguments == [
        "run", "--model", str(model), "--input", str(server.places.input(batch)),
        "--output", str(server.places.batch(batch) / "results.jsonl"), "--run-dir", str(run),
        "--sub-batch", "10", "--seed", "1",
    ]  # fmt: skip


def test_progress_is_that_of_the_journal(
    client: TestClient, server: Server, cluster: Cluster, runs: SlurmRuns, model: Path, batch: str
) -> None:
    runs.turn()
    cluster.states["101"] = "RUNNING"
    work(server, model, batch, done=2)
    runs.turn()
    assert retrieve(client, batch)["request_counts"] == {"total": 3, "completed": 2, "failed": 0}


def test_the_outputs_of_a_complete_run_are_delivered(
    client: TestClient, server: Server, cluster: Cluster, runs: SlurmRuns, model: Path, batch: str
) -> None:
    runs.turn()
    work(server, model, batch, done=3)
    complete(server, batch)
    cluster.states["101"] = "COMPLETED"
    runs.turn()
    ended = retrieve(client, batch)
    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert client.get(f"/v1/files/{ended['output_file_id']}/content").text.count("\n") == 2
    assert client.get(f"/v1/files/{ended['error_file_id']}/content").text.count("\n") == 1
    runs.turn()
    assert len(cluster.submitted) == 1


def test_a_restart_submits_nothing_again(
    client: TestClient, server: Server, cluster: Cluster, runs: SlurmRuns, model: Path, batch: str
) -> None:
    runs.turn()
    again = SlurmRuns(server.store, server.places, RunSettings(model, {}, 10, 2**20), SlurmOptions(), [], lambda: None)  # type: ignore[arg-type,return-value]
    again.turn()
    assert len(cluster.submitted) == 1


def test_a_job_that_fails_is_submitted_again_and_in_the_end_the_batch_fails(
    client: TestClient, cluster: Cluster, runs: SlurmRuns, batch: str
) -> None:
    for number in range(1, MOST_SUBMISSIONS + 1):
        runs.turn()
        assert len(cluster.submitted) == number
        cluster.states[f"{100 + number}"] = "FAILED"
    runs.turn()
    ended = retrieve(client, batch)
    assert ended["status"] == "failed" and ended["errors"]["data"][0]["code"] == "batch_failed"


def test_a_cluster_that_does_not_answer_changes_nothing(
    client: TestClient, cluster: Cluster, runs: SlurmRuns, batch: str
) -> None:
    runs.turn()
    cluster.silent = True
    for _ in range(MOST_SUBMISSIONS + 1):
        runs.turn()
    client.post(f"/v1/batches/{batch}/cancel")
    runs.turn()
    assert retrieve(client, batch)["status"] == "cancelling" and len(cluster.submitted) == 1


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
def test_an_early_end_waits_for_the_jobs_and_delivers_what_they_finished(
    client: TestClient,
    server: Server,
    cluster: Cluster,
    runs: SlurmRuns,
    model: Path,
    batch: str,
    ending: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs.turn()
    cluster.states["101"] = "RUNNING"
    work(server, model, batch, done=2)
    if ending == "cancelled":
        client.post(f"/v1/batches/{batch}/cancel")
    else:
        monkeypatch.setattr(runs, "_clock", lambda: time.time() + 86401)
    runs.turn()
    assert cluster.cancelled == ["101"]
    assert retrieve(client, batch)["status"] == ("cancelling" if ending == "cancelled" else "finalizing")
    cluster.states["101"] = "CANCELLED"
    runs.turn()
    ended = retrieve(client, batch)
    assert ended["status"] == ending
    assert ended["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    (error,) = client.get(f"/v1/files/{ended['error_file_id']}/content").text.splitlines()
    assert json.loads(error)["custom_id"] == "r2" and json.loads(error)["error"]["code"] == f"batch_{ending}"


def test_a_batch_cancelled_before_it_was_submitted_is_over_at_once(
    client: TestClient, cluster: Cluster, runs: SlurmRuns, batch: str
) -> None:
    client.post(f"/v1/batches/{batch}/cancel")
    runs.turn()
    assert retrieve(client, batch)["status"] == "cancelled" and not cluster.submitted
