import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hpcgen.batch import Intake, IntakeError
from hpcgen.batch.tokenization import TokenizerError


def drain(intake):
    items = []
    while (item := intake.take(block=True)) is not None:
        items.append(item)
    return items


def test_items_come_in_input_order_with_errors_in_their_places(batch_input, model_directory, completion):
    lines = [completion(f"id{i}", prompt=[i + 3], n=2) for i in range(40)]
    lines[7] = b"{broken\n"
    lines[20] = completion("long", prompt=[5] * 100)
    with Intake(batch_input(lines), model_directory, 0, max_model_len=64, skip=lambda i: i % 10 == 3) as intake:
        items = drain(intake)
        assert intake.exhausted
        assert intake.take(block=True) is None
    assert [item.request for item in items] == [i for i in range(40) if i % 10 != 3]
    errors = {item.request: item.error for item in items if item.error}
    assert {request: error.code for request, error in errors.items()} == {
        7: "invalid_json",
        20: "context_length_exceeded",
    }
    assert errors[20].message.startswith("line 21: ") and errors[20].custom_id == "long"
    assert all(
        [s.sample for s in item.sequences] == [0, 1] and item.sequences[1].prompt[0] == item.request + 3
        for item in items
        if not item.error
    )


def test_it_runs_ahead_by_a_bounded_number_of_requests_and_the_worker_then_rests(
    batch_input, model_directory, completion
):
    with Intake(batch_input([completion(f"id{i}") for i in range(200)]), model_directory, 0, 64, ahead=32) as intake:
        assert intake.take(block=True).request == 0
        assert intake._in_work + len(intake._items) <= 32
        while not all(task.done() for _, task in intake._tasks):
            time.sleep(0.01)
        workers = [psutil.Process(process.pid) for process in multiprocessing.active_children()]
        before = sum(sum(worker.cpu_times()[:2]) for worker in workers)
        time.sleep(0.3)
        assert sum(sum(worker.cpu_times()[:2]) for worker in workers) - before < 0.1
        assert [item.request for item in drain(intake)] == list(range(1, 200))


def test_taking_without_block_gives_nothing_while_nothing_is_ready(batch_input, model_directory, completion):
    with Intake(batch_input([completion()]), model_directory, 0, 64) as intake:
        assert intake.take(block=False) is None  # the worker has just been told to start
        assert not intake.exhausted
        while (item := intake.take(block=False)) is None:
            time.sleep(0.01)
        assert item.request == 0 and intake.exhausted


def test_an_input_that_is_finished_starts_no_worker(batch_input, model_directory, completion):
    with Intake(batch_input([completion()]), model_directory, 0, 64, skip=lambda i: True) as intake:
        assert intake.exhausted and intake.take(block=True) is None
        assert not multiprocessing.active_children()


def test_the_death_of_a_worker_is_reported(batch_input, model_directory, completion):
    lines = [completion(f"id{i}") for i in range(100)]
    with Intake(batch_input(lines), model_directory, 0, 64, ahead=16) as intake:
        intake.take(block=True)
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(IntakeError, match="worker died"):
            drain(intake)


def test_a_model_without_a_tokenizer_is_one_clear_error(batch_input, tmp_path, completion):
    with (
        Intake(batch_input([completion()]), tmp_path, 0, 64) as intake,
        pytest.raises(TokenizerError, match="cannot load a tokenizer from"),
    ):
        intake.take(block=True)


def test_signals_that_a_scheduler_sends_to_all_processes_do_not_end_a_worker(batch_input, model_directory, completion):
    lines = [completion(f"id{i}") for i in range(100)]
    with Intake(batch_input(lines), model_directory, 0, 64, ahead=16) as intake:
        intake.take(block=True)
        for process in multiprocessing.active_children():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(process.pid, number)
        assert len(drain(intake)) == 99


PARENT = """
import multiprocessing, sys, time
from hpcgen.batch import BatchInput, Intake
if __name__ == "__main__":
    intake = Intake(BatchInput(sys.argv[1]), sys.argv[2], 0, 64)
    intake.take(block=True)
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    time.sleep(600)
"""


def test_workers_end_with_a_parent_that_was_killed_and_never_load_torch(
    batch_input, model_directory, completion, tmp_path
):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    batch = batch_input([completion()])
    arguments = [sys.executable, str(script), str(batch.path), str(model_directory)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        loaded = [mapping.path for worker in workers for mapping in worker.memory_maps()]
        parent.kill()
    assert workers and not any("libtorch" in path for path in loaded)
    assert not psutil.wait_procs(workers, timeout=30)[1]


def test_signals_to_the_whole_job_do_not_kill_a_worker_that_has_just_been_started(batch_input, model_directory, chat):
    """As a preemption right after the start: every process of the job gets the signal, at any moment."""
    received = []
    numbers = (signal.SIGTERM, signal.SIGUSR2)
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in numbers}
    try:
        with Intake(batch_input([chat("a")]), model_directory, 0, max_model_len=100) as intake:
            intake.start()
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline:
                for child in psutil.Process().children(recursive=True):
                    for number in numbers:
                        child.send_signal(number)
                time.sleep(0.005)
            assert intake.take(block=True).sequences
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
