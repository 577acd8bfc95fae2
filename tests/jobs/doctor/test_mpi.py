import sys
from pathlib import Path

import pytest

from hpcgen.jobs.doctor.check import Check, Level
from hpcgen.jobs.doctor.mpi import mpi_library, thread_level
from tests.cluster.launching import needs_mpi, run


def interpreter(directory: Path, script: str) -> str:
    """Stands in for a Python whose MPI does this."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@needs_mpi
def test_the_library_is_named_and_where_it_lies() -> None:
    found, threads = mpi_library()
    assert found.level is threads.level is Level.OK
    assert "MPICH" in found.finding and "libmpi" in found.finding


@pytest.mark.parametrize(
    ("script", "finding", "remedy"),
    [
        ("echo \"ModuleNotFoundError: No module named 'mpi4py'\" >&2; exit 1", "not installed", "hpcgen[mpi]"),
        ("echo 'PMI2_Init failed' >&2; exit 1", "PMI2_Init failed", "srun -n 2 hpcgen doctor"),
    ],
)
def test_a_library_that_cannot_be_used_has_a_remedy(tmp_path: Path, script: str, finding: str, remedy: str) -> None:
    (check,) = mpi_library({}, interpreter(tmp_path, script))
    assert check.level is Level.WARNING and finding in check.finding and remedy in check.remedy


def test_a_library_that_threads_may_not_call_keeps_sequences_where_they_are() -> None:
    assert thread_level(True) == Check("MPI threads", Level.OK, "any thread may call it (MPI_THREAD_MULTIPLE)")
    assert "MIGRATE" in thread_level(False).finding


@needs_mpi
@pytest.mark.xdist_group("ranks")
def test_ranks_say_together_what_they_found_each_node_its_machine(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "hpcgen.cli", "doctor", str(tmp_path)], (1, 2))
    assert done.returncode == 0, done.stderr
    assert "it and MPI agree on 3 ranks (node0: 1, node1: 2)" in done.stdout
    assert "one-sided: Rget of 4 MiB" in done.stdout
    assert done.stdout.count("memlock") == 2 and "rank 0 on node0:" in done.stdout and "rank 1 on node1:" in done.stdout


@needs_mpi
@pytest.mark.xdist_group("ranks")
def test_a_launcher_that_mpi_does_not_know_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    launcher = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
    done = run([sys.executable, "-m", "hpcgen.cli", "doctor", str(tmp_path)], (1,), **launcher)
    assert done.returncode == 1
    assert "MPI and the launcher disagree" in done.stdout and "--mpi=pmi2" in done.stdout
