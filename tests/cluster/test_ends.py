"""How a run of many ranks ends: in good order, or all at once, but never half, and with nothing left behind."""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.caches import own_cache
from tests.cluster.launching import needs_mpi, run, start
from tests.model.tiny_models import save_tiny
from tests.tiny_tokenizer import save_tokenizer

pytestmark = [needs_mpi, pytest.mark.xdist_group("ranks")]
REQUESTS = 24


class Batch:
    """A batch in a directory of its own, and the command that runs it with a fault."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.output = directory / "out.jsonl"
        self.environment = {"HPCGEN_CACHE": own_cache(model.parent / "cache")}
        self._arguments = [
            "run", "--model", str(model), "--input", str(directory / "in.jsonl"), "--output", str(self.output),
            "--dtype", "float32", "--host-memory", "16MB", "--threads", "1", "--expert-batch", "64",
        ]  # fmt: skip
        chosen = random.Random(1)
        with open(directory / "in.jsonl", "w") as file:
            for index in range(REQUESTS):
                prompt = [chosen.randrange(3, 250) for _ in range(chosen.randrange(2, 90))]
                body = {"model": "m", "prompt": prompt, "max_tokens": 5 + 4 * index, "temperature": 0}
                request = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}
                file.write(json.dumps(request) + "\n")

    def command(self, rank: int, fault: str, decision: int, *more: str) -> list[str]:
        program = [sys.executable, "-m", "tests.cluster.programs.faulty_run", str(rank), fault, str(decision)]
        return [*program, *self._arguments, *more]

    def results(self) -> list[tuple[str, str]]:
        lines = map(json.loads, filter(None, self.output.read_text().split("\n")))
        return [(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in lines]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "qwen3_moe"
    save_tiny("qwen3_moe", directory, torch.float32)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def batch(model: Path, tmp_path: Path) -> Batch:
    return Batch(model, tmp_path)


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory():
    """By the host store, by MPI or by Python; what another job has mapped is that one's."""
    before = set(os.listdir("/dev/shm"))
    yield
    for _ in range(100):
        left = set(os.listdir("/dev/shm")) - before - mapped_names()
        if not left:
            break
        time.sleep(0.05)
    assert not left


def mapped_names() -> set[str]:
    """Files in /dev/shm that some process has mapped."""
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            inodes |= {int(line.split()[4]) for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    return {path.name for path in Path("/dev/shm").iterdir() if path.lstat().st_ino in inodes}


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_ends_all_with_its_message_first(batch: Batch, rank: int) -> None:
    begin = time.monotonic()
    done = run(batch.command(rank, "raise", 3), (2,), **batch.environment)
    assert done.returncode != 0 and time.monotonic() - begin < 100
    assert f"rank {rank} of 2 on " in done.stderr and "ValueError: a fault of the test" in done.stderr
    assert done.stderr.index("a fault of the test") < done.stderr.index("Abort")
    assert not batch.output.exists()


def test_a_killed_rank_ends_the_job_and_the_same_command_goes_on(batch: Batch) -> None:
    done = run(batch.command(1, "kill", random.randint(2, 6)), (2,), **batch.environment)
    assert done.returncode != 0 and not batch.output.exists()
    done = run(batch.command(9, "nothing", 1), (3,), **batch.environment)
    assert done.returncode == 0, done.stderr
    assert [name for name, _ in batch.results()] == [f"r{index}" for index in range(REQUESTS)]


def test_a_rank_that_hangs_is_named_with_its_stack(batch: Batch) -> None:
    done = run(batch.command(1, "hang", 4, "--stall-timeout", "8"), (2,), **batch.environment)
    assert done.returncode != 0
    assert "rank 1 of 2" in done.stderr and "is stuck in" in done.stderr and "faulty_run.py" in done.stderr


def test_signals_end_all_ranks_in_good_order_and_what_is_finished_is_kept(batch: Batch) -> None:
    journal = batch.output.with_suffix(".run") / "journal"
    finished = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(batch.command(1, "slow", 1), (2,), **batch.environment)
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and not (journal.exists() and journal.stat().st_size > finished + 2000):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        assert process.returncode not in (0, -9), (output, errors)
        assert "the same command continues" in errors and "Traceback" not in errors, errors
        assert journal.stat().st_size > finished
        finished = journal.stat().st_size
    done = run(batch.command(9, "nothing", 1), (2,), **batch.environment)
    assert done.returncode == 0 and "continuing" in done.stderr, done.stderr
    assert [name for name, _ in batch.results()] == [f"r{index}" for index in range(REQUESTS)]
