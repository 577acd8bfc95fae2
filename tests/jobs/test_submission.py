import pickle
import stat

import pytest

from hpcgen.jobs import slurm
from hpcgen.jobs.job_options import SlurmOptions, SubmissionError, load_cluster_file, merge_options, minutes
from hpcgen.jobs.submission import batch_script, next_instance, submissions, submit

ARGUMENTS = ["run", "--model", "/models/a b", "--seed", "3"]


def script(tmp_path, **options):
    return batch_script(SlurmOptions(**options), tmp_path / "run", ARGUMENTS)


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A directory of stand-ins for Slurm's clients, which accept every job and note what they were given."""
    clients = tmp_path / "clients"
    clients.mkdir()

    def stand_in(name, body):
        path = clients / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    stand_in("sbatch", f'cp "$1" {tmp_path}/script; echo Submitted batch job 42')
    stand_in("scontrol", "exit 1")
    stand_in("srun", "exit 1")
    monkeypatch.setenv("PATH", f"{clients}:/usr/bin:/bin")
    return stand_in


def test_resources_become_options_of_sbatch(tmp_path):
    text = script(
        tmp_path, nodes=2, gpus_per_node=8, partition="gpu", account="a1", qos="q", mem="100G", time="4:00:00"
    )
    for line in (
        "--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=8", "--partition=gpu", "--account=a1", "--qos=q",
        "--mem=100G", "--time=240", "--requeue", "--open-mode=append",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text


def test_what_is_not_asked_for_is_left_to_the_site(tmp_path):
    text = script(tmp_path)
    for word in ("partition", "account", "qos", "--mem", "gpus", "wckey", "constraint", "reservation"):
        assert word not in text


def test_further_options_and_lines_of_shell_find_their_place(tmp_path):
    text = script(
        tmp_path, sbatch={"exclusive": True, "switches": 1}, srun=["--mpi=pmix"], setup=["module load mpi", "ulimit -l"]
    )
    assert "#SBATCH --exclusive\n" in text
    assert "#SBATCH --switches=1\n" in text
    lines = text.splitlines()
    run = next(i for i, line in enumerate(lines) if line.startswith("srun"))
    assert "--mpi=pmix" in lines[run]
    assert lines.index("module load mpi") + 1 == lines.index("ulimit -l") < run


def test_the_stop_signal_comes_before_the_limit_and_the_shell_outlives_it(tmp_path):
    text = script(tmp_path, time="30", signal_seconds=300)
    assert "#SBATCH --signal=USR2@300\n" in text
    lines = text.splitlines()
    assert lines.index("trap stopped=--stopped TERM USR2") < next(
        i for i, x in enumerate(lines) if x.startswith("srun")
    )


def test_after_the_ranks_the_script_requeues_and_ends_with_their_status(tmp_path):
    lines = [line for line in script(tmp_path, max_requeues=7).splitlines() if line]
    run = next(i for i, line in enumerate(lines) if line.startswith("srun"))
    after = [line for line in lines[run + 1 :] if not line.startswith("#")]
    assert f"-m hpcgen.jobs.requeue $? {tmp_path}/run --max-requeues 7 $stopped" in after[0]
    assert after[1] == "exit $?"


def test_a_rank_that_dies_ends_the_job_unless_the_user_wants_otherwise(tmp_path):
    line = next(
        line for line in script(tmp_path, srun=["--kill-on-bad-exit=0"]).splitlines() if line.startswith("srun")
    )
    assert line.index("--kill-on-bad-exit=1") < line.index("--kill-on-bad-exit=0")


def test_instances_are_an_array(tmp_path):
    assert "#SBATCH --array=0-3%4\n" in script(tmp_path, instances=4)
    assert "--instance N" in script(tmp_path, instances=4)
    assert "--array" not in script(tmp_path) and "--instance" not in script(tmp_path)


def test_the_script_says_what_it_runs(tmp_path):
    assert "hpcgen run --model '/models/a b' --seed 3" in script(tmp_path)


def test_a_stop_signal_that_would_come_before_the_start_is_refused():
    with pytest.raises(SubmissionError, match="signal-seconds"):
        merge_options({}, {"time": "2"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90:00", 90), ("90:01", 91), ("4:00:00", 240), ("0:20:30", 21), ("1-12", 2160), ("1-12:30", 2190),
     ("2-00:00:01", 2881), ("0:0:10", 1)],
)  # fmt: skip
def test_time_limits_are_read_as_sbatch_reads_them(text, expected):
    assert minutes(text) == expected


def test_what_is_no_time_limit_is_refused():
    with pytest.raises(SubmissionError, match="soon"):
        minutes("soon")


def test_the_command_line_counts_more_than_the_cluster_file():
    cluster = {"partition": "a", "account": "x", "setup": ["first"], "sbatch": {"exclusive": True, "hint": "a"}}
    options = merge_options(cluster, {"partition": "b", "qos": None, "setup": ["second"], "sbatch": {"hint": "b"}})
    assert (options.partition, options.account, options.qos) == ("b", "x", None)
    assert options.setup == ["first", "second"]
    assert options.sbatch == {"exclusive": True, "hint": "b"}


@pytest.mark.parametrize("cluster", [{"partitoin": "x"}, {"nodes": "two"}, {"instances": 0}])
def test_a_wrong_name_or_value_in_a_cluster_file_is_named(cluster):
    with pytest.raises(SubmissionError, match=next(iter(cluster))):
        merge_options(cluster, {})


@pytest.mark.parametrize(("name", "ours"), [("array", "--instances"), ("time", "--time"), ("output", "itself")])
def test_options_of_sbatch_that_would_undo_ours_are_refused(name, ours):
    with pytest.raises(SubmissionError, match=ours):
        merge_options({}, {"sbatch": {name: "x"}})


def test_a_time_without_quotes_in_yaml_is_explained():
    with pytest.raises(SubmissionError, match="quotes"):
        merge_options({"time": 14400}, {})


def test_a_cluster_file_is_found_by_path_and_unknown_ones_are_named(tmp_path):
    path = tmp_path / "here.yaml"
    path.write_text("slurm:\n  partition: p\n")
    assert load_cluster_file(str(path)) == {"slurm": {"partition": "p"}}
    with pytest.raises(SubmissionError, match="known clusters"):
        load_cluster_file("no-such-cluster")
    path.write_text("slurm: [\n")
    with pytest.raises(SubmissionError, match="cannot read"):
        load_cluster_file(str(path))
    path.write_text("slurm: 3\n")
    with pytest.raises(SubmissionError, match="no cluster file"):
        load_cluster_file(str(path))


def test_a_job_is_recorded_in_the_run_directory(tmp_path, sbatch):
    record = submit(SlurmOptions(nodes=2), tmp_path / "run", ARGUMENTS)
    assert record.job_id == "42"
    assert submissions(tmp_path / "run") == [record]
    assert record.arguments == ARGUMENTS
    assert record.slurm["nodes"] == 2
    assert "#SBATCH --nodes=2" in (tmp_path / "script").read_text()


def test_an_array_is_one_submission(tmp_path, sbatch):
    record = submit(SlurmOptions(instances=3), tmp_path / "run", ARGUMENTS, first=next_instance(tmp_path / "run"))
    assert (record.job_id, record.instances, record.job_of("1")) == ("42", ["0", "1", "2"], "42_1")
    assert "--array=0-2%3" in (tmp_path / "script").read_text()
    tasks = [pickle.loads(path.read_bytes()).function for path in sorted((tmp_path / "run").rglob("42_*.pkl"))]
    assert [task.arguments for task in tasks] == [[*ARGUMENTS, "--instance", name] for name in "012"]
    assert next_instance(tmp_path / "run") == 3


def test_one_instance_is_a_job_that_others_can_join(tmp_path, sbatch):
    record = submit(SlurmOptions(instances=1), tmp_path / "run", ARGUMENTS, first=3)
    assert (record.instances, record.job_of("3")) == (["3"], "42")
    assert "--array" not in (tmp_path / "script").read_text()


def test_the_words_of_sbatch_are_in_the_message(tmp_path, sbatch):
    sbatch("sbatch", "echo 'sbatch: error: invalid partition specified: p' >&2; exit 1")
    with pytest.raises(SubmissionError, match="invalid partition specified"):
        submit(SlurmOptions(), tmp_path / "run", ARGUMENTS)
    assert submissions(tmp_path / "run") == []


def test_without_slurm_there_is_one_clear_message(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(slurm.SlurmError, match="no Slurm here"):
        submit(SlurmOptions(), tmp_path / "run", ARGUMENTS)


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "submission-1.json").write_text("{")
    with pytest.raises(SubmissionError, match=r"submission-1\.json"):
        submissions(tmp_path)
