"""How a run of many ranks ends: in good order, or all at once, but never half, and with nothing left behind."""

import random
import signal
import time

import pytest

from tests.cluster.faulty_batch import REQUESTS, Batch
from tests.cluster.launching import needs_mpi, run, start

pytestmark = [
    needs_mpi,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.usefixtures("nothing_left_in_shared_memory"),
]


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
    done = run(batch.command(1, "hang", 4, "--stall-timeout", "15"), (2,), **batch.environment)
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
