"""A run that is stopped by a signal, as by preemption, and goes on from its checkpoint."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcgen.checkpoint.reader import CheckpointReader
from hpcgen.jobs.requeue import INTERRUPTED
from hpcgen.report.events import read_events
from tests.jobs.conftest import Run, read_lines, request, write_requests


def command(model: Path, directory: Path, *more: object) -> list[str]:
    files = ["--input", directory / "in.jsonl", "--output", directory / "out.jsonl"]
    fixed = ["--threads", 1, "--host-memory", "64MB", "--expert-batch", 64, *more]
    return [sys.executable, "-m", "hpcgen.cli", *map(str, ["run", "--model", model, *files, *fixed])]


def stopped(line: list[str], directory: Path, environment: dict[str, str], number: signal.Signals, after: str) -> str:
    """Starts a run, sends it a signal once its events contain `after`, and gives what it said."""
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    events = directory / "out.run" / "events.jsonl"
    deadline = time.monotonic() + 90
    seen = events.read_text().count(after) if events.exists() else 0
    while process.poll() is None and time.monotonic() < deadline:
        if events.exists() and events.read_text().count(after) > seen:
            break
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, said
    return said


@pytest.mark.parametrize("device_memory", [None, "1.0MB"], ids=["in place", "small device"])
def test_a_stopped_run_goes_on_with_its_tokens_and_its_kv_and_ends_with_the_same_results(
    model: Path, tmp_path: Path, hpcgen: Run, environment: dict[str, str], device_memory: str | None
) -> None:
    requests = [
        request(n, max_tokens=200, temperature=n % 2, seed=n, n=1 + n % 2, logprobs=n % 3 == 0) for n in range(40)
    ]
    more = [] if device_memory is None else ["--device-memory", device_memory, "--attention-microbatch", 64]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory in (whole, parts):
        directory.mkdir()
        write_requests(directory / "in.jsonl", requests)
    assert hpcgen(*command(model, whole, *more)[3:]).returncode == 0
    said = stopped(command(model, parts, *more), parts, environment, signal.SIGTERM, '"decode"')
    assert "Traceback" not in said and "the same command continues" in said
    checkpoint = CheckpointReader(parts / "out.run" / "checkpoints").latest()
    assert checkpoint is not None and len(checkpoint.sequences) > 0 and len(checkpoint.kv) > 0
    done = hpcgen(*command(model, parts, *more)[3:])
    assert done.returncode == 0, done.stderr
    restored = [event for event in read_events(parts / "out.run" / "events.jsonl") if event["event"] == "restored"]
    assert restored[0]["sequences"] > 0 and restored[0]["kv_tokens"] > 0
    results = [
        [line["response"]["body"]["choices"] for line in read_lines(directory / "out.jsonl")]
        for directory in (whole, parts)
    ]
    texts = [[[c["message"]["content"] for c in choices] for choices in lines] for lines in results]
    assert len(texts[0]) == 40 and texts[0] == texts[1]
    tokens = [
        [[[t["token"] for t in c["logprobs"]["content"]] for c in choices if c["logprobs"]] for choices in lines]
        for lines in results
    ]
    assert tokens[0] == tokens[1]
    assert not any((parts / "out.run" / "checkpoints").iterdir())


def test_periodic_checkpoints_survive_a_kill_that_gives_no_warning(
    model: Path, tmp_path: Path, hpcgen: Run, environment: dict[str, str]
) -> None:
    write_requests(tmp_path / "in.jsonl", [request(n, max_tokens=200) for n in range(128)])
    # One sequence at a time in attention: what a snapshot holds is unfinished still when it is durable.
    line = command(model, tmp_path, "--checkpoint-interval", 0.2, "--attention-microbatch", 1)
    process = subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    checkpoints = tmp_path / "out.run" / "checkpoints"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (checkpoints.exists() and list(checkpoints.glob("*.json"))):
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = hpcgen(*command(model, tmp_path)[3:])
    assert done.returncode == 0 and "restored" in done.stderr
    assert len(read_lines(tmp_path / "out.jsonl")) == 128


def test_a_signal_before_anything_runs_ends_the_job_and_the_next_one_does_it_all(
    model: Path, tmp_path: Path, hpcgen: Run, environment: dict[str, str]
) -> None:
    write_requests(tmp_path / "in.jsonl", [request(n) for n in range(5)])
    line = command(model, tmp_path)
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (INTERRUPTED, -signal.SIGTERM) and "Traceback" not in said
    assert hpcgen(*line[3:]).returncode == 0
    assert len(read_lines(tmp_path / "out.jsonl")) == 5
    assert json.loads((tmp_path / "out.run" / "SUCCESS").read_text())["requests_ok"] == 5
