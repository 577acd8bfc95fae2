"""Several `hpcgen run --instance` on one run directory, without a cluster."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcgen.batch.lock import live_owner
from hpcgen.cli import main
from hpcgen.jobs.leases import LeaseCounts, own_name
from hpcgen.report.events import read_events
from tests.jobs.conftest import Run, read_lines, request, write_requests

REQUESTS = 60


def arguments(model: Path, directory: Path, *more: object) -> list[str]:
    files = ["--input", directory / "in.jsonl", "--output", directory / "out.jsonl"]
    sizes = ["--threads", 1, "--host-memory", "64MB", "--expert-batch", 4, "--lease-expiry", 3]
    return [str(word) for word in ["run", "--model", model, *files, *sizes, *more]]


@pytest.fixture
def start(model: Path, tmp_path: Path, environment: dict[str, str]) -> Callable[..., "subprocess.Popen[str]"]:
    started = []

    def start(name: str, *more: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "hpcgen.cli", *arguments(model, tmp_path, "--instance", name, *more)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_others_had_begun_is_finished_by_one_that_takes_it_over_and_writes_the_output(
    start: Callable[..., "subprocess.Popen[str]"], model: Path, tmp_path: Path, hpcgen: Run
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    for directory in (whole, tmp_path):
        write_requests(directory / "in.jsonl", [request(n, max_tokens=60, temperature=n % 2) for n in range(REQUESTS)])
    assert hpcgen(*arguments(model, whole)).returncode == 0
    run = tmp_path / "out.run"
    silent, left = start("silent"), start("left")
    wait(lambda: len(LeaseCounts.read(run / "leases").done) == 2)
    silent.send_signal(signal.SIGSTOP)  # it holds leases, and shows no life
    left.terminate()
    assert left.wait(60) == 75
    last = start("last")
    out, messages = last.communicate(timeout=90)
    assert last.returncode == 0 and "results" in out, messages
    silent.send_signal(signal.SIGCONT)
    out, messages = silent.communicate(timeout=60)
    assert silent.returncode == 0 and "is complete" in messages and "taken over" in messages
    results, expected = read_lines(tmp_path / "out.jsonl"), read_lines(whole / "out.jsonl")
    assert [line["custom_id"] for line in results] == [f"r{n}" for n in range(REQUESTS)]
    choices = [[line["response"]["body"]["choices"] for line in lines] for lines in (results, expected)]
    assert choices[0] == choices[1]
    counts = LeaseCounts.read(run / "leases")
    assert sum(counts.done.values()) == REQUESTS and set(counts.done) == {"silent", "left", "last"}
    events = read_events(run / "instances" / "last" / "events.jsonl")
    inherited = [event for event in events if event["event"] == "inherited"]
    assert sum(event["tokens"] for event in inherited) > 0
    report = hpcgen("report", run)
    assert report.returncode == 0, report.stderr


def test_two_of_the_same_name_and_runs_that_are_not_shared_are_refused(
    start: Callable[..., "subprocess.Popen[str]"],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_requests(tmp_path / "in.jsonl", [request(n, max_tokens=200) for n in range(100 * REQUESTS)])
    first = start("a", "--sub-batch", 1)
    wait(lambda: (tmp_path / "out.run" / "leases").exists())
    assert main(arguments(model, tmp_path, "--instance", "a")) == 2
    assert "in use by process" in capsys.readouterr().err
    assert main(arguments(model, tmp_path)) == 2
    assert "join them with --instance" in capsys.readouterr().err
    assert main(arguments(model, tmp_path, "--instance", "b", "--sub-batch", 7)) == 2
    assert "sub_batch is 7, but was 1" in capsys.readouterr().err
    owner = live_owner(tmp_path / "out.run" / "instances" / "a")
    assert owner is not None and owner.pid == first.pid
    first.terminate()
    assert first.wait(90) == 75
    alone = ["--output", str(tmp_path / "alone.jsonl")]
    (tmp_path / "in.jsonl").write_text((tmp_path / "in.jsonl").read_text().split("\n")[0] + "\n")
    assert main([*arguments(model, tmp_path), *alone]) == 0
    assert main([*arguments(model, tmp_path, "--instance", "c"), *alone]) == 2
    assert "begun by one job alone" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a/b", "..", "a b"])
def test_a_name_that_no_directory_can_have_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_requests(tmp_path / "in.jsonl", [request(0)])
    assert main(arguments(model, tmp_path, "--instance", name)) == 2
    assert "cannot be the name of an instance" in capsys.readouterr().err
    assert not (tmp_path / "out.run").exists()


def test_an_instance_without_a_name_is_its_task_its_job_or_its_host() -> None:
    assert own_name({"SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "17"}) == "3"
    assert own_name({"SLURM_JOB_ID": "17"}) == "17"
    assert own_name({}) == os.uname().nodename
