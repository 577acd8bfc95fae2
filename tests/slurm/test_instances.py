"""Instances that share a run directory on a real Slurm cluster: they come, are preempted, and die one by one."""

import json
import os
import signal

import pytest

from hpcgen.batch.journal import scan
from hpcgen.batch.lock import live_owner
from hpcgen.jobs import slurm
from hpcgen.jobs.leases import LeaseCounts
from tests.slurm.conftest import REQUESTS, ROOT, wait

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow]
OPTIONS = ("--sub-batch", 8, "--lease-expiry", 6)


def jobs(run, job_id):
    """Tasks of an array, or the one job."""
    shown = run.cluster.run("scontrol", "--oneliner", "show", "job", job_id)
    return slurm.parse_jobs(shown.stdout)


def counts(run):
    return LeaseCounts.read(run.directory / "leases")


def finished(run):
    """Requests that each instance has a record of."""
    return {
        path.parent.name: [request for request, _, _ in scan(path)]
        for path in (run.directory / "instances").glob("*/journal")
    }


def check_shared_results(run):
    """Those of a run that nothing disturbed, each sub-batch from one instance and released as it is in the output."""
    run.check_results()
    parts = sorted((run.directory / "outputs" / "sub_batches").glob("??????.jsonl"))
    assert b"".join(path.read_bytes() for path in parts) == run.output.read_bytes()
    assert sum(counts(run).done.values()) == len(parts) and counts(run).free == 0


def test_instances_are_added_preempted_and_killed_while_the_others_go_on(run):
    run.batch = run.batch.repeated(4, run.output.with_name("long.jsonl"))
    run.submit("--time", 10, "--instances", 2, "--sbatch", "exclusive", *OPTIONS)
    wait(lambda: len(counts(run).done) == 2, "both instances to finish a sub-batch")
    added = run.cluster.hpcgen("add-instances", run.directory, 1).stdout.split()[1]
    wait(lambda: "2" in counts(run).held, "the third instance to join")
    first, second = sorted(jobs(run, run.job_id), key=lambda job: job.id)
    preempting = ["--partition=high", f"--nodelist={first.nodes}", "--exclusive", "--output=/dev/null", "--wrap=true"]
    run.cluster.run("sbatch", *preempting)
    os.kill(live_owner(run.directory / "instances" / "1").pid, signal.SIGKILL)
    everything = [first.id, second.id, added]
    wait(lambda: all(jobs(run, id)[0].ended for id in everything), "the end of all instances")
    preempted, killed, joined = (jobs(run, id)[0] for id in everything)
    assert (preempted.state, killed.state, joined.state) == ("COMPLETED", "FAILED", "COMPLETED"), run.log
    assert preempted.restarts == 1 and joined.restarts == 0
    check_shared_results(run)
    assert set(counts(run).done) == {"0", "1", "2"}
    # What the killed one had finished of a sub-batch is not made again by the one that took it over.
    by_instance = finished(run)
    again = sum(map(len, by_instance.values())) - len(set().union(*by_instance.values()))
    copied = sum(len(set(by_instance["1"]) & set(by_instance[name])) for name in ("0", "2"))
    assert again == copied


def test_an_array_by_plain_sbatch_is_preempted_and_goes_on(run):
    script = ROOT / "slurm" / "instances.sbatch"
    done = run.cluster.run(
        "sbatch", "--parsable", "--time=10", "--array=0-1", script, *run.arguments, *OPTIONS,
        "--run-dir", run.directory,
        cwd=run.output.parent, env=run.cluster.environment | {"HPCGEN_HOME": str(ROOT)},
    )  # fmt: skip
    run.job_id = done.stdout.strip()
    wait(lambda: sum(counts(run).done.values()) > REQUESTS // 40, "some results")
    run.cluster.preempt()
    wait(lambda: all(job.ended for job in jobs(run, run.job_id)), "the end of the array")
    logs = "\n".join(path.read_text() for path in run.output.parent.glob("hpcgen-*.log"))
    assert {job.state for job in jobs(run, run.job_id)} == {"COMPLETED"}, logs
    assert all(job.restarts for job in jobs(run, run.job_id))
    check_shared_results(run)
    assert json.loads((run.directory / "SUCCESS").read_text())["requests_ok"] == REQUESTS


def test_a_shared_run_and_one_of_a_single_job_do_not_mix(run):
    run.submit("--time", 10, "--instances", 1, "--sbatch", "begin=now+1hour")
    for options in ((), ("--instances", 2)):
        again = run.cluster.hpcgen("submit", *run.arguments, *options, check=False)
        assert again.returncode == 2 and "wait or run already" in again.stderr
    assert run.cluster.hpcgen("add-instances", run.directory, 2).stdout.split()[-2:] == ["1,", "2"]
    state = run.cluster.hpcgen("status", run.directory).stdout
    assert "waiting" in state
    assert run.cluster.hpcgen("cancel", run.directory).stdout.count("cancelled job") == 2
