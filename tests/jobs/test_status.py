from dataclasses import replace

import pytest

from hpcgen.batch.lock import DirectoryLock, Owner
from hpcgen.batch.run_directory import RunDirectoryError
from hpcgen.jobs import slurm
from hpcgen.jobs.status import find_runs, follow, read_state, render, render_list
from tests.jobs.runs import add_events, add_submission, job_line, make_run


@pytest.fixture
def controller(monkeypatch):
    """What Slurm answers to a question for a job; nothing for others."""
    answers = {}
    monkeypatch.setattr(slurm, "jobs", lambda job_id, timeout=0: slurm.parse_jobs(answers.get(job_id, "")))
    return answers


def test_a_run_counts_what_its_journal_has(tmp_path, controller):
    state = read_state(make_run(tmp_path / "run", requests=10, ok=4, failed=2))
    assert (state.requests, state.ok, state.failed, state.word) == (10, 4, 2, "stopped")
    assert "6 of 10 done (60%), 2 failed" in render(state)


def test_a_journal_that_is_being_written_is_counted_up_to_its_last_whole_record(tmp_path, controller):
    run = make_run(tmp_path / "run", ok=3)
    with open(run / "journal", "ab") as file:
        file.write(b"\x10\x00\x00\x00half")
    assert read_state(run).ok == 3


def test_journals_of_several_instances_count_together_and_nothing_twice(tmp_path, controller):
    run = make_run(tmp_path / "run")
    for name, ok in (("a", 3), ("b", 5)):
        (run / "instances" / name).mkdir(parents=True)
        (make_run(tmp_path / name, ok=ok) / "journal").rename(run / "instances" / name / "journal")
    assert read_state(run).ok == 5


@pytest.mark.parametrize(
    ("state", "word"),
    [("RUNNING", "running"), ("PENDING", "waiting"), ("CANCELLED", "stopped"), ("COMPLETING", "waiting")],
)
def test_the_state_of_a_run_is_that_of_its_jobs(tmp_path, controller, state, word):
    run = make_run(tmp_path / "run")
    add_submission(run)
    controller["5"] = job_line(state=state)
    assert read_state(run).word == word


def test_a_complete_run_is_complete_whatever_its_jobs_do(tmp_path, controller):
    run = make_run(tmp_path / "run", ok=10, complete=True)
    add_submission(run)
    controller["5"] = job_line()
    assert read_state(run).word == "complete"


def test_a_job_that_waits_before_the_run_has_begun_can_be_seen(tmp_path, controller):
    add_submission(tmp_path / "run")
    controller["5"] = job_line(state="PENDING", Reason="Resources")
    text = render(read_state(tmp_path / "run"))
    assert "waiting" in text
    assert "pending (Resources)" in text


def test_a_stopped_run_says_how_to_go_on(tmp_path, controller):
    run = make_run(tmp_path / "run", ok=1)
    add_submission(run)
    text = render(read_state(run))
    assert "Slurm no longer knows it" in text
    assert f"hpcgen resume {run}" in text


def test_requeues_and_nodes_of_a_job_are_shown(tmp_path, controller):
    run = make_run(tmp_path / "run")
    add_submission(run)
    controller["5"] = job_line(Restarts=3)
    assert "running on n1, until 2026-01-01 00:00:00 at most, requeued 3 times" in render(read_state(run))


def test_without_slurm_the_files_still_tell(tmp_path, monkeypatch):
    def fail(job_id, timeout=0):
        raise slurm.SlurmError("the controller is down")

    monkeypatch.setattr(slurm, "jobs", fail)
    run = make_run(tmp_path / "run", ok=2)
    add_submission(run)
    text = render(read_state(run))
    assert "2 of 10" in text
    assert "the controller is down" in text


def test_the_phase_is_that_of_the_last_job(tmp_path, controller):
    run = make_run(tmp_path / "run")
    add_events(run, {"event": "opened"}, {"event": "phase", "phase": "decode"})
    assert read_state(run).vitals.phase == "decode"
    add_events(run, {"event": "opened"})
    assert read_state(run).vitals.phase == ""


def test_a_process_that_works_in_the_directory_is_a_run_that_runs(tmp_path, controller):
    run = make_run(tmp_path / "run")
    lock = DirectoryLock(run)
    assert read_state(run).word == "running"
    lock.release()
    state = read_state(run)
    assert state.word == "stopped" and state.over
    assert "the same hpcgen run command" in render(state)


def test_a_running_job_shows_its_essentials(tmp_path, controller):
    run = make_run(tmp_path / "run", requests=10, ok=4, failed=1)
    add_events(
        run,
        {"event": "opened", "time": 1000.0},
        {"event": "memory", "time": 1001.0, "host_pages": 200},
        {"event": "steps", "time": 1010.0, "phase": "prefill", "tokens": 4000, "seconds": 4.0},
        {"event": "steps", "time": 1050.0, "phase": "decode", "tokens": 10_000, "seconds": 40.0},
        {"event": "load", "time": 1050.0, "active": [3, 4], "suspended": 5, "waiting": 6, "host_pages": [50, 100]},
    )
    state = read_state(run)
    state = replace(state, process=Owner("n1", 1, 0.0, "x"))
    text = render(state)
    assert "time         0:50 of work, about 0:50 left" in text
    assert "10,000 decoded; lately prefill 1,000/s, decode 250/s" in text
    assert "7 active (3 to 4 a rank), 5 suspended, 6 waiting" in text
    assert "50% in use, at least 25%" in text


def test_following_ends_with_the_run(tmp_path, controller):
    run = make_run(tmp_path / "run", ok=10)
    lock = DirectoryLock(run)
    shown = []

    def sleep(seconds):
        lock.release()
        (run / "SUCCESS").touch()

    follow(run, shown.append, 1.0, sleep)
    assert [text.splitlines()[0].rpartition(" ")[2] for text in shown] == ["running", "complete"]


def test_what_is_no_run_is_one_clear_message(tmp_path):
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        read_state(tmp_path)


def test_runs_are_found_below_a_directory(tmp_path, controller):
    make_run(tmp_path / "a" / "one", ok=10, complete=True)
    make_run(tmp_path / "two", ok=1, failed=1)
    add_submission(tmp_path / "three")
    (tmp_path / "nothing").mkdir()
    runs = find_runs(tmp_path)
    assert [run.name for run in runs] == ["one", "three", "two"]
    table = render_list([read_state(run) for run in runs]).splitlines()
    assert table[0].split() == ["run", "state", "done", "requests", "failed", "jobs"]
    assert table[1].split()[1:] == ["complete", "10", "10", "0"]
