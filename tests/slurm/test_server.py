"""`hpcgen serve --slurm` in front of a real Slurm cluster."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from hpcgen.jobs.submission import submissions
from tests.slurm.conftest import wait

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow]


class Serving:
    """A running server; started again on the same directory it is the same one."""

    def __init__(self, cluster, model: Path, directory: Path) -> None:
        description = directory / "cluster.yaml"
        description.write_text("slurm: {partition: low, time: '0:10:00'}\n")
        self.state, self.log = directory / "state", directory / "serve.log"
        command = [sys.executable, "-m", "hpcgen.cli", "serve", "--slurm", description, "--slurm-poll", "0.5"]
        command += ["--model", model, "--directory", self.state, "--port", "0", "--expert-batch", "4"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([str(word) for word in command], env=cluster.environment, stderr=log)
        wait(lambda: "http://" in self.log.read_text() or self.process.poll() is not None, "the server")
        (url,) = re.findall(r"http://\S+", self.log.read_text())
        self.client = openai.OpenAI(base_url=url, api_key="none")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def serve(cluster, batch, tmp_path):
    started = []

    def start() -> Serving:
        started.append(Serving(cluster, batch.model, tmp_path))
        return started[-1]

    yield start
    for serving in started:
        if serving.process.poll() is None:
            serving.end(signal.SIGKILL)


def test_batches_become_jobs_and_survive_the_server(cluster, batch, serve):
    serving = serve()
    file = serving.client.files.create(file=batch.input, purpose="batch")
    ids = [
        serving.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
        for _ in range(2)
    ]

    def retrieve(number):
        return serving.client.batches.retrieve(ids[number])

    wait(lambda: retrieve(1).request_counts.completed, "the second batch to get going")
    assert serving.end(signal.SIGKILL) == -signal.SIGKILL
    time.sleep(1)
    serving = serve()
    serving.client.batches.cancel(ids[1])
    wait(lambda: retrieve(1).status == "cancelled", "the end of the second batch")
    cancelled = retrieve(1)
    delivered = serving.client.files.content(cancelled.output_file_id).content.splitlines()
    left = serving.client.files.content(cancelled.error_file_id).content.splitlines()
    assert len(delivered) == cancelled.request_counts.completed > 0
    assert len(delivered) + len(left) == len(batch.results)
    assert {json.loads(line)["error"]["code"] for line in left} == {"batch_cancelled"}

    wait(lambda: retrieve(0).status == "completed", "the end of the first batch")
    completed = retrieve(0)
    assert completed.request_counts.completed == len(batch.results) and completed.error_file_id is None
    lines = serving.client.files.content(completed.output_file_id).content.splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == list(batch.results)
    for id in ids:
        assert len(submissions(serving.state / "batches" / id / "run")) == 1
    assert serving.end(signal.SIGTERM) == 0
