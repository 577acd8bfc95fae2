import argparse
from pathlib import Path

import pytest

from hpcgen.cli import add_run_arguments
from hpcgen.errors import HpcgenError
from hpcgen.jobs import preflight, slurm, submission
from hpcgen.jobs.commands import add_job_parsers
from hpcgen.jobs.submit_commands import arguments_of_run
from tests.jobs.runs import add_submission, job_line, make_run


def parse(*words):
    parser = argparse.ArgumentParser()
    add_job_parsers(parser.add_subparsers(dest="command"), add_run_arguments)
    return parser.parse_args([str(word) for word in words])


def call(*words):
    arguments = parse(*words)
    return arguments.call(arguments)


SUBMIT = ("submit", "--model", "m", "--input", "in.jsonl", "--output", "out.jsonl")


def run_parser():
    parser = argparse.ArgumentParser()
    add_run_arguments(parser.add_subparsers(dest="command").add_parser("run"))
    return parser


def test_a_job_gets_the_arguments_of_run_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = parse(*SUBMIT, "--seed", 7, "--device-memory", "1GiB", "--nodes", 2, "--partition", "p")
    words = arguments_of_run(arguments, add_run_arguments)
    run = run_parser().parse_args(words)
    assert run.model == tmp_path / "m"
    assert run.run_dir == tmp_path / "out.run"
    assert (run.seed, run.device_memory) == (7, 2**30)
    assert not {"--partition", "--nodes", "--dtype"} & set(words)


def test_switches_and_repeated_options_survive(tmp_path):
    def add(parser):
        for name in ("output", "run-dir"):
            parser.add_argument(f"--{name}", type=Path)
        parser.add_argument("--on", action="store_true")
        parser.add_argument("--off", action="store_true")
        parser.add_argument("--move", action=argparse.BooleanOptionalAction, default=True)
        parser.add_argument("--stay", action=argparse.BooleanOptionalAction, default=True)
        parser.add_argument("--each", action="append")
        parser.add_argument("--shift", type=int, default=0)

    parser = argparse.ArgumentParser()
    add(parser)
    given = ["--output", f"{tmp_path}/o", "--on", "--no-move", "--each", "a", "--each", "b", "--shift", "-1"]
    words = arguments_of_run(parser.parse_args(given), add)
    assert words == ["run", "--output", f"{tmp_path}/o", "--run-dir", f"{tmp_path}/o.run", *given[2:]]


def test_a_dry_run_prints_the_script_and_touches_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(*SUBMIT, "--nodes", 3, "--sbatch", "exclusive", "--sbatch", "hint=compute_bound", "--dry-run") == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=3\n#SBATCH" in script
    assert "#SBATCH --exclusive\n" in script
    assert "#SBATCH --hint=compute_bound\n" in script
    assert list(tmp_path.iterdir()) == []


def test_values_of_a_cluster_file_are_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text("slurm:\n  partition: preempt\n  srun: [--mpi=pmi2]\n")
    call(*SUBMIT, "--cluster", "site.yaml", "--dry-run")
    script = capsys.readouterr().out
    assert "--partition=preempt" in script
    assert "--mpi=pmi2" in script


@pytest.fixture
def controller(monkeypatch):
    """State of job 5, and the jobs that were cancelled."""
    told = {"state": "RUNNING", "cancelled": []}
    monkeypatch.setattr(slurm, "jobs", lambda job_id, timeout=0: slurm.parse_jobs(job_line(job_id, told["state"])))
    monkeypatch.setattr(slurm, "cancel", told["cancelled"].append)
    return told


def test_cancel_cancels_the_jobs_that_wait_or_run(tmp_path, controller):
    add_submission(tmp_path)
    call("cancel", tmp_path)
    assert controller["cancelled"] == ["5"]
    controller["state"] = "COMPLETED"
    with pytest.raises(HpcgenError, match="no job"):
        call("cancel", tmp_path)


@pytest.fixture
def submitted(monkeypatch):
    """What was submitted: (nodes, names of instances, run directory, arguments) of each job."""
    seen = []

    def submit(options, run_directory, arguments, first=0):
        names = [str(first + number) for number in range(options.instances or 0)]
        seen.append((options.nodes, names, run_directory, arguments))
        return submission.Submission("6", names, 2.0, arguments, {})

    monkeypatch.setattr(submission, "submit", submit)
    monkeypatch.setattr(preflight, "check_job", lambda options, script: None)
    return seen


def test_resume_submits_the_last_job_again_with_what_is_changed(tmp_path, controller, submitted, capsys):
    make_run(tmp_path / "run")
    add_submission(tmp_path / "run", "4", 1.0, ["run", "old"])
    add_submission(tmp_path / "run", "5", 2.0, ["run", "new"])
    with pytest.raises(HpcgenError, match="still waits or runs"):
        call("resume", tmp_path / "run")
    controller["state"] = "CANCELLED"
    assert call("resume", tmp_path / "run") == 0
    assert call("resume", tmp_path / "run", "--nodes", 2) == 0
    assert submitted == [(nodes, [], tmp_path / "run", ["run", "new"]) for nodes in (1, 2)]
    assert "6" in capsys.readouterr().out
    with pytest.raises(HpcgenError, match="without --instances"):
        call("resume", tmp_path / "run", "--instances", 2)


def test_instances_are_added_under_new_numbers_and_resumed_under_the_old_ones(tmp_path, controller, submitted):
    add_submission(tmp_path, instances=["0", "1"])
    (tmp_path / "instances" / "4").mkdir(parents=True)
    call("add-instances", tmp_path, 2)
    controller["state"] = "CANCELLED"
    call("resume", tmp_path)
    call("resume", tmp_path, "--instances", 1)
    assert [names for _, names, _, _ in submitted] == [["5", "6"], ["0", "1", "2", "3", "4"], ["0"]]


def test_a_run_that_one_job_has_for_itself_gets_no_further_instances(tmp_path, controller, submitted):
    add_submission(tmp_path / "one")
    with pytest.raises(HpcgenError, match="only what was submitted with --instances"):
        call("add-instances", tmp_path / "one", 2)
    make_run(tmp_path / "none")
    with pytest.raises(HpcgenError, match="--instance NAME"):
        call("add-instances", tmp_path / "none", 2)
    assert submitted == []


def test_one_instance_can_be_cancelled(tmp_path, controller, monkeypatch):
    tasks = "".join(job_line(ArrayJobId=5, ArrayTaskId=task) + "\n" for task in range(2))
    monkeypatch.setattr(slurm, "jobs", lambda job_id, timeout=0: slurm.parse_jobs(tasks))
    add_submission(tmp_path, instances=["7", "8"])
    call("cancel", tmp_path, "--instance", 8)
    assert controller["cancelled"] == ["5_1"]
    with pytest.raises(HpcgenError, match="instance 9"):
        call("cancel", tmp_path, "--instance", 9)


def test_resume_of_a_complete_run_or_one_never_submitted_is_refused(tmp_path, controller):
    make_run(tmp_path / "a", complete=True)
    with pytest.raises(HpcgenError, match="complete"):
        call("resume", tmp_path / "a")
    make_run(tmp_path / "b")
    with pytest.raises(HpcgenError, match="was not submitted"):
        call("resume", tmp_path / "b")


def test_status_and_list_print_what_is_known(tmp_path, controller, capsys):
    make_run(tmp_path / "a", ok=4)
    call("status", tmp_path / "a")
    assert "4 of 10" in capsys.readouterr().out
    call("list", tmp_path)
    assert str(tmp_path / "a") in capsys.readouterr().out


def test_list_of_nothing_is_a_message(tmp_path):
    with pytest.raises(HpcgenError, match="no run"):
        call("list", tmp_path)


def test_logs_are_shown(tmp_path, controller, capsys):
    make_run(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "5_0_log.out").write_text("hello\n")
    call("logs", tmp_path)
    assert capsys.readouterr().out == "hello\n"
    call("logs", "-f", tmp_path)
    assert capsys.readouterr().out == "hello\n"
