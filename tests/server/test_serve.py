"""The command as an operator runs it and the official client as users do; it is killed and started again."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai.types import Batch

from tests.caches import own_cache
from tests.cluster.launching import MPIRUN, needs_mpi
from tests.server.conftest import ANNA, BELA
from tests.server.requests import input_file, line
from tests.tiny_llama import save_tiny_llama

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama", hidden_size=32, context=2048)


class Serving:
    """A running `hpcgen serve`."""

    def __init__(self, model: Path, directory: Path, environment: dict[str, str], *launcher: object) -> None:
        self.log = directory.with_name("serve.log")
        command = [
            *map(str, launcher),
            sys.executable,
            "-m",
            "hpcgen.cli",
            "serve",
            "--local",
            "--model",
            str(model),
            "--port",
            "0",
        ]
        command += ["--directory", str(directory), "--host-memory", "64MiB", "--threads", "1"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=log, stdout=log)
        self.url = self._wait_for_url()

    def client(self, token: str = ANNA) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=token, max_retries=0)

    def kill(self) -> None:
        """Both processes, the HTTP one without a word from the other."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(children, timeout=30)
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def _wait_for_url(self) -> str:
        for _ in range(600):
            found = re.search(r"hpcgen serve: (http://\S+)", self.log.read_text())
            if found:
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())


Start = Callable[..., Serving]


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts the server, always in the same directory; what is given goes before its command."""
    directory = tmp_path_factory.mktemp("serve") / "state"
    cache = own_cache(tmp_path_factory.mktemp("cache"))
    environment = os.environ | {"HPCGEN_CACHE": cache, "OMP_NUM_THREADS": "1", "HPCGEN_TOKENS": f"{ANNA},{BELA}"}
    started: list[Serving] = []

    def start_one(*launcher: object) -> Serving:
        started.append(Serving(model, directory, environment, *launcher))
        return started[-1]

    yield start_one
    for serving in started:
        if serving.process.poll() is None:
            serving.kill()


def submit(client: openai.OpenAI, content: bytes, window: Any = "24h") -> Batch:
    file = client.files.create(file=("input.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window=window)


def wait(client: openai.OpenAI, batch: Batch, seconds: float = 90) -> Batch:
    deadline = time.monotonic() + seconds
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(text) for text in client.files.content(file).content.splitlines()]


def test_a_whole_life_with_the_official_client_and_a_kill(start: Start) -> None:
    serving = start()
    client = serving.client()
    assert [model.id for model in client.models.list()] == ["tiny-llama"]

    # A cycle: upload, create, poll, download both files.
    content = input_file(30) + line(30, temperature=7) + line(31, prompt=[5] * 3000)
    batch = wait(client, submit(client, content))
    assert batch.status == "completed" and batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (32, 30, 2)
    first = lines(client, batch.output_file_id)
    assert [entry["custom_id"] for entry in first] == [f"r{number}" for number in range(30)]
    assert all(entry["response"]["body"]["usage"]["completion_tokens"] == 4 for entry in first)
    assert [entry["custom_id"] for entry in lines(client, batch.error_file_id)] == ["r30", "r31"]

    # Another token sees nothing of it.
    other = serving.client(BELA)
    assert list(other.batches.list()) == [] and list(other.files.list()) == []
    with pytest.raises(openai.NotFoundError):
        other.batches.retrieve(batch.id)
    with pytest.raises(openai.AuthenticationError):
        serving.client("wrong" * 5).models.list()

    # Many long requests, then a small batch that overtakes them, and one that is cancelled.
    large = submit(client, input_file(1500, max_tokens=400))
    small = wait(client, submit(client, input_file(2)), 60)
    assert small.status == "completed"
    large = client.batches.retrieve(large.id)
    assert large.status == "in_progress"
    cancelled = submit(client, input_file(20, max_tokens=1900))
    client.batches.cancel(cancelled.id)
    assert wait(client, cancelled).status == "cancelled"

    # Killed at any moment, with a batch accepted a moment before, nothing is lost.
    last = submit(client, input_file(3))
    serving.kill()
    serving = start()
    client = serving.client()
    assert wait(client, last, 60).status == "completed"
    assert [page.id for page in client.batches.list(limit=2)][:2] == [last.id, cancelled.id]
    assert client.batches.retrieve(large.id).status == "in_progress"
    client.batches.cancel(large.id)
    large = wait(client, large)
    assert large.status == "cancelled" and large.request_counts is not None
    delivered = len(lines(client, large.output_file_id)) if large.output_file_id else 0
    assert delivered == large.request_counts.completed
    assert delivered + len(lines(client, large.error_file_id)) == 1500

    # Paths that a client's library would put straight.
    host, port = serving.url.removeprefix("http://").removesuffix("/v1").split(":")
    for path in ("/v1/files/../../state.sqlite", "/v1/files/..%2f..%2fstate.sqlite/content", "//etc/passwd"):
        with socket.create_connection((host, int(port))) as connection:
            request = f"GET {path} HTTP/1.0\r\nHost: {host}\r\nAuthorization: Bearer {ANNA}\r\n\r\n"
            connection.sendall(request.encode())
            assert connection.makefile("rb").readline().split()[1] == b"404"

    # It leaves in good order when it is asked to.
    assert serving.stop() == 0


@needs_mpi
@pytest.mark.xdist_group("ranks")
def test_on_two_ranks_a_batch_that_a_kill_interrupted_is_finished(start: Start) -> None:
    serving = start(MPIRUN, "-n", 2)
    client = serving.client()
    batch = submit(client, input_file(300, max_tokens=60))
    while not client.batches.retrieve(batch.id).request_counts.completed:  # type: ignore[union-attr]
        time.sleep(0.1)
    serving.kill()
    serving = start(MPIRUN, "-n", 2)
    client = serving.client()
    done = wait(client, batch)
    assert done.status == "completed"
    output = lines(client, done.output_file_id)
    assert [entry["custom_id"] for entry in output] == [f"r{number}" for number in range(300)]
    assert serving.stop() == 0


def test_mistakes_of_the_operator_are_one_line_and_status_2(model: Path, tmp_path: Path) -> None:
    def run(*options: object) -> str:
        command = [sys.executable, "-m", "hpcgen.cli", "serve", *map(str, options)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=os.environ | {"HPCGEN_TOKENS": ""}
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr
        return done.stderr

    slurm = ("--slurm", "nowhere", "--directory", tmp_path)
    assert "there is no cluster file" in run(*slurm, "--model", model)
    assert "is not a model directory" in run(*slurm, "--model", tmp_path)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("slurm: {time: '1:00:00'}\n")
    outside = run("--slurm", cluster, "--directory", tmp_path / "state", "--model", model, "--host", "0.0.0.0")
    assert "--token-file" in outside
