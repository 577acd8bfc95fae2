import pytest

from hpcgen.jobs import requeue, slurm
from hpcgen.jobs.signals import INTERRUPTED

TERMINATED, USER_SIGNAL = 143, 140


@pytest.mark.parametrize("status", [INTERRUPTED, TERMINATED, USER_SIGNAL, 0])
@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING"])
def test_a_run_that_was_stopped_goes_back_to_the_queue(status, state):
    assert requeue.decide(status, False, 0, 10, state)[0]


@pytest.mark.parametrize("status", [1, 2, 137])
def test_a_run_that_ended_by_itself_does_not(status):
    again, reason = requeue.decide(status, False, 0, 10, "RUNNING")
    assert not again
    assert str(status) in reason


def test_ranks_that_srun_killed_because_of_a_stop_signal_go_back_too():
    assert requeue.decide(137, False, 0, 10, "RUNNING", stopped=True)[0]
    assert not requeue.decide(137, False, 0, 10, "CANCELLED", stopped=True)[0]


def test_a_complete_run_does_not_whatever_its_status():
    assert not requeue.decide(INTERRUPTED, True, 0, 10, "RUNNING")[0]


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "UNKNOWN"])
def test_a_job_that_the_user_cancelled_stays_cancelled(state):
    assert not requeue.decide(INTERRUPTED, False, 0, 10, state)[0]


def test_the_number_of_requeues_is_limited():
    assert requeue.decide(INTERRUPTED, False, 9, 10, "RUNNING")[0]
    again, reason = requeue.decide(INTERRUPTED, False, 10, 10, "RUNNING")
    assert not again
    assert "resume" in reason


@pytest.fixture
def controller(monkeypatch):
    """Records requeues; the job runs."""
    requeued = []
    line = "JobId=7 JobName=x JobState=RUNNING Restarts=1"
    monkeypatch.setattr(slurm, "jobs", lambda job, timeout=0: slurm.parse_jobs(line))
    monkeypatch.setattr(slurm, "requeue", requeued.append)
    monkeypatch.setattr(requeue.signal, "signal", lambda *args: None)
    return requeued


ENVIRONMENT = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


def test_the_script_ends_with_the_status_of_the_run(controller, tmp_path):
    assert requeue.main(["75", str(tmp_path)], ENVIRONMENT) == 75
    assert controller == ["7"]


def test_restarts_so_far_count(controller, tmp_path):
    requeue.main(["75", str(tmp_path), "--max-requeues", "1"], ENVIRONMENT)
    assert controller == []


def test_the_success_marker_is_looked_for(controller, tmp_path):
    (tmp_path / "SUCCESS").touch()
    assert requeue.main(["75", str(tmp_path)], ENVIRONMENT) == 0
    assert controller == []


def test_a_launcher_that_says_0_of_a_run_that_is_not_complete_is_not_believed(controller, tmp_path):
    assert requeue.main(["0", str(tmp_path)], ENVIRONMENT) == 1
    assert controller == ["7"]
    (tmp_path / "SUCCESS").touch()
    assert requeue.main(["0", str(tmp_path)], ENVIRONMENT) == 0
    assert controller == ["7"]


def test_outside_of_slurm_nothing_is_requeued(controller, tmp_path):
    assert requeue.main(["75", str(tmp_path)], {}) == 75
    assert controller == []


def test_a_controller_that_refuses_is_a_message_not_a_crash(controller, tmp_path, monkeypatch, capsys):
    def refuse(job):
        raise slurm.SlurmError("requeue is off")

    monkeypatch.setattr(slurm, "requeue", refuse)
    assert requeue.main(["75", str(tmp_path)], ENVIRONMENT) == 75
    assert "requeue is off" in capsys.readouterr().err
