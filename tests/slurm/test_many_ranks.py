"""A run of several ranks on a real Slurm cluster: what a preemption and a smaller job make of it."""

import pytest

from hpcgen.report.events import read_events
from tests.cluster.launching import needs_mpi
from tests.slurm.conftest import REQUESTS, wait

pytestmark = [needs_mpi, pytest.mark.xdist_group("slurm"), pytest.mark.slow]


@pytest.fixture
def two_nodes(tmp_path):
    """Options of `submit` for a rank on each of two nodes; daemons of one host have one shared memory."""
    prolog = tmp_path / "prolog"
    prolog.write_text("#!/bin/sh\necho export HPCGEN_NODE=$SLURMD_NODENAME\n")
    prolog.chmod(0o755)
    return ("--time", 10, "--nodes", 2, f"--srun=--task-prolog={prolog}")


def events(run, kind):
    return [event for event in read_events(run.directory / "events.jsonl") if event["event"] == kind]


def test_ranks_on_two_nodes_are_preempted_and_go_on_as_one_rank(run, two_nodes):
    run.submit(*two_nodes)
    run.wait_for_results(REQUESTS // 4)
    run.cluster.preempt()
    wait(lambda: run.job.restarts or run.job.ended, "the requeue")
    run.wait_for_results(REQUESTS // 2)
    run.cluster.hpcgen("cancel", run.directory)
    run.wait_for_end("CANCELLED")
    run.submit("--time", 10)
    run.wait_for_end()
    run.check_results()
    assert [job["ranks"] for job in events(run, "opened")] == [2, 2, 1]
    assert events(run, "opened")[0]["hosts"] == ["n1", "n2"]
    assert [job["kv_tokens"] > 0 for job in events(run, "restored")] == [True, True]
