"""A private Slurm cluster, a run that takes a while, and what its results must be."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpcgen.batch.journal import scan
from hpcgen.jobs import slurm
from tests.caches import own_cache
from tests.tiny_llama import save_tiny_llama

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "private-cluster.sh"
PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins"
NODES = 3
CPUS = 4
REQUESTS = 160
PATIENCE = 240.0
"""Seconds after which a cluster that should have done something is given up."""


@dataclass
class Cluster:
    """A running private cluster; its clients are found by SLURM_CONF."""

    root: Path
    environment: dict[str, str]
    high_jobs: list[str] = field(default_factory=list)

    def run(self, *command: object, **options: Any) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        options = {"timeout": 120, "check": True, "env": self.environment} | options
        return subprocess.run(words, capture_output=True, text=True, **options)

    def hpcgen(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "hpcgen.cli", *arguments, **options)

    def job(self, job_id: str) -> slurm.Job:
        """As the controller has it now."""
        (job,) = slurm.parse_jobs(self.run("scontrol", "--oneliner", "show", "job", job_id).stdout)
        return job

    def preempt(self) -> None:
        """A job of the partition `high` takes all nodes for a moment."""
        done = self.run(
            "sbatch", "--parsable", "--partition=high", f"--nodes={NODES}", "--exclusive", "--output=/dev/null",
            "--wrap=sleep 0.1",
        )  # fmt: skip
        self.high_jobs.append(done.stdout.strip())

    def up(self, **settings: str) -> None:
        self.run(SCRIPT, "up", env=self.environment | settings)

    def down(self) -> None:
        self.run(SCRIPT, "down", check=False)


def wait(condition, what, patience=PATIENCE):
    """Polls until the condition is true."""
    limit = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < limit, f"waited {patience:.0f} s for {what}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def cluster_root(tmp_path_factory):
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="session")
def private_cluster(cluster_root):
    """The cluster before it is up; taken down at the end whatever happens."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
    if not all(shutil.which(name, path=path) for name in ("slurmctld", "slurmd", "sbatch")):
        pytest.skip(f"no Slurm here; install it with: apt-get install --no-install-recommends {PACKAGES}")
    root = cluster_root / "cluster"
    settings = {
        "CLUSTER_ROOT": str(root), "CLUSTER_NODES": str(NODES), "CLUSTER_CPUS": str(CPUS),
        "CLUSTER_PORT": str(_free_ports(NODES + 1)), "SLURM_CONF": str(root / "slurm.conf"), "PATH": path,
        "HPCGEN_CACHE": own_cache(cluster_root / "cache"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PYTEST"))}
    cluster = Cluster(root, environment | settings)
    yield cluster
    cluster.down()


@pytest.fixture(scope="session")
def cluster(private_cluster):
    """With the user signal before preemption."""
    private_cluster.up()
    return private_cluster


@pytest.fixture
def cluster_without_user_signal(cluster):
    """Preemption sends SIGTERM alone, as on many real clusters."""
    cluster.down()
    cluster.up(CLUSTER_USER_SIGNAL="0")
    yield cluster
    cluster.down()
    cluster.up()


@dataclass(frozen=True)
class Batch:
    """A model, an input that takes some time, and the results of a run that nothing disturbed."""

    model: Path
    input: Path
    results: dict[str, Any]

    def repeated(self, times: int, path: Path) -> "Batch":
        """The same requests several times over; their seeds make the answers the same too."""
        requests = [json.loads(line) for line in self.input.read_text().splitlines()]
        results = {}
        with open(path, "w") as file:
            for copy in range(times):
                for request in requests:
                    name = f"{request['custom_id']}.{copy}"
                    file.write(json.dumps(request | {"custom_id": name}) + "\n")
                    results[name] = self.results[request["custom_id"]]
        return Batch(self.model, path, results)


@pytest.fixture(scope="session")
def batch(cluster_root, private_cluster):
    model = save_tiny_llama(cluster_root / "tiny-llama", context=1024)
    path = cluster_root / "input.jsonl"
    with open(path, "w") as file:
        for number in range(REQUESTS):
            body = {
                "messages": [{"role": "user", "content": f"the fox number {number}"}],
                "max_tokens": 100 + 7 * number % 100,
                "temperature": 0.8 * (number % 2),
                "ignore_eos": True,
                "seed": number,
            }
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    output = cluster_root / "undisturbed.jsonl"
    private_cluster.hpcgen("run", *arguments(model, path, output), timeout=PATIENCE)
    return Batch(model, path, read_results(output))


def arguments(model, path, output):
    """Of `hpcgen run`; small waves, so that results come one after the other."""
    return ("--model", model, "--input", path, "--output", output, "--expert-batch", 4)


class Run:
    """A run submitted to the cluster."""

    def __init__(self, cluster: Cluster, batch: Batch, directory: Path) -> None:
        self.cluster = cluster
        self.batch = batch
        self.output = directory / "results.jsonl"
        self.directory = directory / "results.run"
        self.job_id = ""

    @property
    def arguments(self):
        return arguments(self.batch.model, self.batch.input, self.output)

    def submit(self, *options: object) -> None:
        done = self.cluster.hpcgen("submit", *self.arguments, *options)
        self.job_id = done.stdout.split()[1]

    @property
    def job(self) -> slurm.Job:
        return self.cluster.job(self.job_id)

    @property
    def finished(self) -> int:
        journal = self.directory / "journal"
        return sum(1 for _ in scan(journal)) if journal.exists() else 0

    def wait_for_results(self, count: int) -> None:
        wait(lambda: self.finished >= count or self.job.ended, f"{count} results")
        assert self.finished >= count, self.log

    def wait_for_end(self, state: str = "COMPLETED") -> None:
        wait(lambda: self.job.ended, f"the end of job {self.job_id}")
        assert self.job.state == state, f"{self.job}\n{self.log}"

    @property
    def log(self) -> str:
        logs = sorted((self.directory / "jobs").glob("*_log.out"))
        return "\n".join(f"==> {path.name} <==\n{path.read_text(errors='replace')}" for path in logs)

    def check_results(self) -> None:
        """Complete, in order, and those of a run that nothing disturbed."""
        assert (self.directory / "SUCCESS").exists()
        results = read_results(self.output)
        assert list(results) == list(self.batch.results)
        assert results == self.batch.results


@pytest.fixture
def run(cluster, batch, tmp_path):
    submitted = Run(cluster, batch, tmp_path)
    yield submitted
    if submitted.job_id:
        cluster.run("scancel", "--user", str(os.getuid()), check=False)
        wait(lambda: not cluster.run("squeue", "--noheader").stdout, "all jobs to be cancelled")


def read_results(output: Path) -> dict[str, Any]:
    """What each request was answered, by custom_id, in the order of the file."""
    lines = [json.loads(line) for line in output.read_text().split("\n") if line]
    bodies = {line["custom_id"]: line["response"]["body"] for line in lines}
    assert len(bodies) == len(lines)
    return {name: (body["choices"], body["usage"]) for name, body in bodies.items()}


def _free_ports(count: int) -> int:
    """First of `count` neighbouring TCP ports that are free."""
    bases = range(23000 + os.getpid() % 1000 * 8, 32000, 8)
    return next(base for base in bases if all(map(_is_free, range(base, base + count))))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
