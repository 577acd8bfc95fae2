import time

import pytest

from hpcgen.jobs import slurm

RUNNING = (
    "JobId=7 JobName=a name UserId=root(0) JobState=RUNNING Reason=None Restarts=2 TimeLimit=00:10:00 "
    "StartTime=2026-11-30T23:22:22 EndTime=2026-11-30T23:23:27 ReqB:S:C:T=0:0:*:* NodeList=n[1-2] "
    "TRES=cpu=2,node=2 Command=/tmp/with space/job.sh WorkDir=/tmp"
)
TASK = "JobId=9 ArrayJobId=8 ArrayTaskId=3 JobName=x JobState=PENDING Reason=Resources Restarts=0 NodeList="


def test_fields_of_a_job_are_read_from_one_line():
    (job,) = slurm.parse_jobs(RUNNING + "\n")
    assert (job.id, job.state, job.restarts, job.nodes) == ("7", "RUNNING", 2, "n[1-2]")
    assert job.end == "2026-11-30T23:23:27"
    assert job.running
    assert not job.ended


def test_a_task_of_an_array_has_the_name_that_slurm_takes():
    running, task = slurm.parse_jobs(f"{RUNNING}\n{TASK}\n\n")
    assert task.id == "8_3"
    assert not running.ended
    assert not task.running


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "5"}, "5"),
        ({"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "2"}, "8_2"),
    ],
)
def test_a_process_knows_its_own_job(environment, job):
    assert slurm.job_id(environment) == job


def test_the_time_left_is_that_to_the_end_of_the_job(monkeypatch):
    monkeypatch.setattr(slurm, "client", lambda *command, timeout=0: RUNNING)
    now = time.mktime(time.strptime("2026-11-30T23:23:00", "%Y-%m-%dT%H:%M:%S"))
    assert slurm.seconds_left("7", now) == 27


def test_a_job_that_is_being_killed_has_the_kill_wait_left(monkeypatch):
    answers = {"show": RUNNING.replace("RUNNING", "COMPLETING"), "config": "KillWait                = 30 sec"}
    monkeypatch.setattr(
        slurm, "client", lambda *command, timeout=0: answers[command[2] if "config" in command else "show"]
    )
    assert slurm.seconds_left("7") == 30


def test_the_time_left_is_unknown_where_slurm_does_not_answer(monkeypatch):
    def fail(*command, timeout=0):
        raise slurm.SlurmError("down")

    monkeypatch.setattr(slurm, "client", fail)
    assert slurm.seconds_left("7") is None


def test_a_job_without_a_time_limit_has_no_known_end(monkeypatch):
    line = RUNNING.replace("EndTime=2026-11-30T23:23:27", "EndTime=Unknown")
    monkeypatch.setattr(slurm, "client", lambda *command, timeout=0: line)
    assert slurm.seconds_left("7") is None


def test_a_job_that_slurm_has_forgotten_is_no_error(monkeypatch):
    def fail(*command, timeout=0):
        raise slurm.SlurmError("scontrol show failed: slurm_load_jobs error: Invalid job id specified")

    monkeypatch.setattr(slurm, "client", fail)
    assert slurm.jobs("7") == []


def test_an_absent_client_is_one_clear_message():
    with pytest.raises(slurm.SlurmError, match="no hpcgen-absent-client here"):
        slurm.client("hpcgen-absent-client")


def test_a_client_that_hangs_is_given_up():
    with pytest.raises(slurm.SlurmError, match="no answer"):
        slurm.client("sleep", "10", timeout=0.05)


def test_a_client_that_fails_shows_its_own_words():
    with pytest.raises(slurm.SlurmError, match="no such thing"):
        slurm.client("sh", "-c", "echo no such thing >&2; exit 1")
