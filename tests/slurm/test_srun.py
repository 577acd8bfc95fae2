"""`srun hpcgen run`, without a batch script: the ranks of one and of two nodes, and what happens without a PMI."""

import pytest

from tests.cluster.launching import needs_mpi
from tests.slurm.conftest import ROOT, arguments, read_results

pytestmark = [needs_mpi, pytest.mark.xdist_group("slurm")]

WITH_NODE_NAMES = ("bash", "-c", 'HPCGEN_NODE=$SLURMD_NODENAME exec "$@"', "_")
"""All nodes of the private cluster are one host: their ranks are told apart by name."""


@pytest.mark.parametrize("shape", ["--nodes=1 --ntasks=2", "--nodes=2 --ntasks=3"])
def test_ranks_that_srun_started_give_the_results_of_one_process(cluster, batch, tmp_path, shape: str) -> None:
    output = tmp_path / "results.jsonl"
    command = (*WITH_NODE_NAMES, "python", "-m", "hpcgen.cli", "run", *arguments(batch.model, batch.input, output))
    environment = cluster.environment | {"SRUN_OPTIONS": shape, "BIND_REPORT": "1"}
    done = cluster.run(ROOT / "launch" / "srun.sh", *command, "--dtype", "float32", env=environment)
    ranks = int(shape[-1])
    assert done.stderr.count("network any") == ranks, "bind.sh has not seen every rank"
    assert read_results(output) == batch.results


def test_ranks_that_cannot_see_each_other_are_refused_before_any_work(cluster, batch, tmp_path) -> None:
    output = tmp_path / "results.jsonl"
    command = ("python", "-m", "hpcgen.cli", "run", *arguments(batch.model, batch.input, output))
    done = cluster.run("srun", "--ntasks=2", "--mpi=none", *command, check=False)
    assert done.returncode == 2 and not output.exists() and not output.with_suffix(".run").exists()
    assert "srun started 2 ranks, but MPI" in done.stderr and "--mpi=pmi2" in done.stderr
