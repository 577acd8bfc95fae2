"""Runs on a real Slurm cluster: whatever happens to the job, the results are those of a run that nothing disturbed."""

import random
import time

import pytest

from tests.slurm.conftest import NODES, REQUESTS, ROOT, wait

# One cluster, and tests that are about time: all in one worker.
pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow]


def test_a_submitted_run_completes_and_can_be_watched(run):
    run.submit("--time", 10)
    run.wait_for_results(1)
    assert f"of {REQUESTS} done" in run.cluster.hpcgen("status", run.directory).stdout
    run.wait_for_end()
    run.check_results()
    assert "complete" in run.cluster.hpcgen("status", run.directory).stdout
    assert f"{REQUESTS} ok, 0 failed" in run.cluster.hpcgen("logs", run.directory).stdout
    assert "complete" in run.cluster.hpcgen("list", run.directory.parent).stdout
    again = run.cluster.hpcgen("submit", *run.arguments, check=False)
    assert again.returncode == 2
    assert "is complete" in again.stderr


def test_a_preempted_job_goes_on_where_it_was(run):
    run.submit("--time", 10)
    run.wait_for_results(REQUESTS // 4)
    run.cluster.preempt()
    wait(lambda: run.job.restarts, "the requeue")
    run.wait_for_end()
    run.check_results()
    assert "continuing" in run.log


def test_a_cluster_that_sends_sigterm_alone_loses_nothing_either(cluster_without_user_signal, run):
    run.submit("--time", 10)
    run.wait_for_results(REQUESTS // 4)
    run.cluster.preempt()
    wait(lambda: run.job.restarts, "the requeue")
    run.wait_for_end()
    run.check_results()


def test_ten_preemptions_at_random_moments_lose_nothing(run):
    chosen = random.Random(7)
    run.submit("--time", 10)
    for number in range(10):
        wait(lambda: run.job.running or run.job.ended, "the job to run")
        time.sleep(chosen.uniform(0, 6))
        if run.job.ended:
            break
        run.cluster.preempt()
        wait(lambda n=number: run.job.restarts > n or run.job.ended, "the requeue")
    run.wait_for_end()
    run.check_results()
    assert run.job.restarts >= 5


def test_a_job_that_loses_its_node_goes_on_elsewhere(run):
    run.submit("--time", 10)
    run.wait_for_results(REQUESTS // 4)
    (node,) = [name for name in (f"n{i}" for i in range(1, NODES + 1)) if name == run.job.nodes]
    run.cluster.run(ROOT / "slurm" / "private-cluster.sh", "fail", node)
    try:
        run.cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
        wait(lambda: run.job.restarts and run.job.running, "the job to run elsewhere")
        assert run.job.nodes != node
        run.wait_for_end()
        run.check_results()
    finally:
        run.cluster.run(ROOT / "slurm" / "private-cluster.sh", "recover", node)
        run.cluster.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)


def test_a_cancelled_job_stays_cancelled_until_it_is_resumed(run):
    run.submit("--time", 10)
    run.wait_for_results(REQUESTS // 4)
    run.cluster.hpcgen("cancel", run.directory)
    run.wait_for_end("CANCELLED")
    time.sleep(1)
    assert run.job.state == "CANCELLED"
    assert "stopped" in run.cluster.hpcgen("status", run.directory).stdout
    run.job_id = run.cluster.hpcgen("resume", run.directory).stdout.split()[1]
    run.wait_for_end()
    run.check_results()


def sbatch_instance(run):
    """Submits the run by the batch script for plain sbatch; the job id."""
    script = ROOT / "slurm" / "instance.sbatch"
    done = run.cluster.run(
        "sbatch", "--parsable", "--time=10", script, *run.arguments, "--run-dir", run.directory,
        cwd=run.output.parent, env=run.cluster.environment | {"HPCGEN_HOME": str(ROOT)},
    )  # fmt: skip
    return done.stdout.strip()


def test_a_plain_batch_script_is_preempted_and_goes_on(run):
    run.job_id = sbatch_instance(run)
    run.wait_for_results(REQUESTS // 4)
    run.cluster.preempt()
    wait(lambda: run.job.restarts, "the requeue")
    run.wait_for_end()
    run.check_results()


def test_a_second_job_on_the_same_run_directory_is_refused(run):
    run.submit("--time", 10)
    run.wait_for_results(1)
    again = run.cluster.hpcgen("submit", *run.arguments, check=False)
    assert again.returncode == 2
    assert f"({run.job_id})" in again.stderr
    second = sbatch_instance(run)
    wait(lambda: run.cluster.job(second).ended, "the second job to end")
    assert run.cluster.job(second).state == "FAILED"
    assert "is in use by process" in (run.output.parent / f"hpcgen-{second}.log").read_text()
    run.wait_for_end()
    run.check_results()


def test_a_run_longer_than_the_time_limit_is_requeued_until_it_is_done(run):
    # One sequence at a time, long enough on a fast machine too: the signal comes after a minute at the latest, and
    # Slurm may send it up to a minute early.
    run.batch = run.batch.repeated(4, run.output.with_name("long.jsonl"))
    run.submit("--time", 2, "--signal-seconds", 60, "--expert-batch", 1)
    wait(lambda: run.job.restarts or run.job.ended, "the time limit")
    assert run.job.restarts, run.log
    run.wait_for_end()
    run.check_results()


def test_what_would_fail_in_the_queue_is_refused_before(run):
    other = run.output.with_name("other.jsonl")
    other.write_text("{\n")
    refused = run.cluster.hpcgen(
        "submit", "--model", run.batch.model, "--input", other, "--output", run.output, check=False
    )
    assert refused.returncode == 2
    assert "no line" in refused.stderr
    refused = run.cluster.hpcgen("submit", *run.arguments, "--partition", "absent", check=False)
    assert refused.returncode == 2
    assert "invalid partition" in refused.stderr
