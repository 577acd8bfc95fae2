import json

import pytest

from hpcgen.batch.fingerprint import model_fingerprint
from hpcgen.batch.lock import DirectoryLock
from hpcgen.batch.reader import BatchInput
from hpcgen.errors import HpcgenError
from hpcgen.jobs import slurm
from hpcgen.jobs.job_options import SlurmOptions
from hpcgen.jobs.preflight import (
    PreflightError,
    check_input,
    check_job,
    check_memory,
    check_model,
    check_run_directory,
    node_memory,
)
from tests.jobs.runs import add_submission, job_line, make_run

GIB = 2**30
SINFO = "low* 4000 1:00:00\nlow* 2000 1:00:00\nbig 9000 infinite\nmixed 4000+ infinite\n"


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return directory


def write_input(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def request(name):
    body = {"prompt": "x", "max_tokens": 1}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})


@pytest.fixture
def batch(tmp_path):
    return BatchInput(write_input(tmp_path / "in.jsonl", [request("a"), request("b")]))


def said():
    lines = []
    return lines, lines.append


def test_a_model_directory_has_its_weights(model):
    assert check_model(model) == 10


def test_a_directory_without_weights_is_no_model(model):
    (model / "model.safetensors").unlink()
    with pytest.raises(HpcgenError):
        check_model(model)


def test_the_first_errors_of_the_input_are_shown(tmp_path):
    lines, say = said()
    path = write_input(tmp_path / "in.jsonl", [request("a"), *["{"] * 5])
    assert len(check_input(path, say)) == 6
    assert len(lines) == 4
    assert "line 2" in lines[0]
    assert "2 more lines" in lines[3]


@pytest.mark.parametrize("lines", [[], ["{"], ["{", "}"]])
def test_an_input_in_which_nothing_can_be_run_is_refused(tmp_path, lines):
    with pytest.raises(PreflightError):
        check_input(write_input(tmp_path / "in.jsonl", lines), lambda line: None)


def test_weights_that_do_not_fit_a_node_are_refused():
    with pytest.raises(PreflightError, match=r"--mem"):
        check_memory(100 * GIB, 64 * GIB, lambda line: None)


def test_little_room_for_kv_is_a_warning():
    lines, say = said()
    check_memory(60 * GIB, 64 * GIB, say)
    check_memory(10 * GIB, 64 * GIB, say)
    check_memory(100 * GIB, None, say)
    assert len(lines) == 1
    assert "4.0 GiB" in lines[0]


@pytest.mark.parametrize(
    ("mem", "cluster", "expected"),
    [
        ("100G", {}, 100 * GIB),
        ("512", {}, 512 * 2**20),
        ("1.5T", {"node": {"host_memory": 1}}, 1536 * GIB),
        (None, {"node": {"host_memory": "2e12"}}, 2 * 10**12),
        ("0", {}, None),
        (None, {}, None),
    ],
)
def test_the_memory_of_a_node_is_what_is_asked_for_else_what_the_cluster_file_says(monkeypatch, mem, cluster, expected):
    monkeypatch.setattr(slurm, "partitions", lambda names: [])
    assert node_memory(SlurmOptions(mem=mem), cluster) == expected


@pytest.mark.parametrize(
    ("partition", "expected"), [(None, 4000 * 2**20), ("big", 9000 * 2**20), ("big,low", 9000 * 2**20), ("mixed", None)]
)
def test_else_it_is_what_slurm_says_of_the_partition(monkeypatch, partition, expected):
    monkeypatch.setattr(slurm, "client", lambda *command: SINFO)
    assert node_memory(SlurmOptions(partition=partition), {}) == expected


def test_a_job_that_would_wait_for_ever_is_refused(monkeypatch):
    def client(command, *arguments):
        if command == "sinfo":
            return SINFO
        raise slurm.SlurmError("sbatch --test-only failed: allocation failure: Invalid feature specification")

    monkeypatch.setattr(slurm, "client", client)
    with pytest.raises(PreflightError, match="--time 90 is more than the partition allows, 1:00:00"):
        check_job(SlurmOptions(time="90"), "")
    with pytest.raises(PreflightError, match="Invalid feature"):
        check_job(SlurmOptions(time="90", partition="low,big"), "")


def check(tmp_path, batch, model, output=None, shared=False, **options):
    check_run_directory(tmp_path / "run", batch, model, output or tmp_path / "out.jsonl", options, shared=shared)


def test_a_new_run_directory_is_made(tmp_path, batch, model):
    check(tmp_path, batch, model)
    assert (tmp_path / "run" / "jobs").is_dir()


def test_a_submission_that_slurm_refused_can_be_repeated(tmp_path, batch, model):
    for _ in range(2):
        check(tmp_path, batch, model)


def test_a_stopped_run_of_the_same_input_and_model_may_go_on(tmp_path, batch, model):
    make_run(tmp_path / "run", requests=2, sha256=batch.sha256, fingerprint=model_fingerprint(model))
    check(tmp_path, batch, model)


def test_a_run_of_another_input_or_model_is_refused(tmp_path, batch, model):
    make_run(tmp_path / "run")
    with pytest.raises(PreflightError, match="another input"):
        check(tmp_path, batch, model)
    make_run(tmp_path / "run", sha256=batch.sha256)
    with pytest.raises(PreflightError, match="another model"):
        check(tmp_path, batch, model)


def test_a_run_that_was_begun_otherwise_is_refused(tmp_path, batch, model):
    make_run(tmp_path / "run", sha256=batch.sha256, fingerprint=model_fingerprint(model), options={"seed": 1})
    check(tmp_path, batch, model, seed=1, max_model_len=None)
    with pytest.raises(PreflightError, match="--seed 1, not 2"):
        check(tmp_path, batch, model, seed=2)
    with pytest.raises(PreflightError, match="without --instances"):
        check(tmp_path, batch, model, seed=1, shared=True)


def test_a_run_that_a_process_here_works_on_is_refused(tmp_path, batch, model):
    (tmp_path / "run").mkdir()
    lock = DirectoryLock(tmp_path / "run")
    with pytest.raises(PreflightError, match="on this machine"):
        check(tmp_path, batch, model)
    lock.release()
    check(tmp_path, batch, model)


def test_a_complete_run_is_refused(tmp_path, batch, model):
    make_run(tmp_path / "run", sha256=batch.sha256, fingerprint=model_fingerprint(model), complete=True)
    with pytest.raises(PreflightError, match="complete"):
        check(tmp_path, batch, model)


def test_a_run_that_waits_in_the_queue_is_refused(tmp_path, batch, model, monkeypatch):
    monkeypatch.setattr(slurm, "jobs", lambda job_id, timeout=0: slurm.parse_jobs(job_line("5", "PENDING")))
    add_submission(tmp_path / "run", "5")
    with pytest.raises(PreflightError, match=r"\(5\)"):
        check(tmp_path, batch, model)


def test_an_output_that_cannot_be_written_is_refused(tmp_path, batch, model):
    with pytest.raises(HpcgenError, match="absent"):
        check(tmp_path, batch, model, tmp_path / "absent" / "out.jsonl")
