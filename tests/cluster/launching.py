"""Starts programs of `tests/cluster/programs` as real MPI ranks, on one node or on several that are named apart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgen.cluster.world import NODE_NAME

MPIRUN = Path(sys.executable).with_name("mpirun")
needs_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: pip install 'hpcgen[mpi]'")
ROOT = Path(__file__).parents[2]
TIMEOUT = 150


def start(command: list[str], nodes: tuple[int, ...], **environment: str) -> subprocess.Popen:
    """`command` on ranks; `nodes` has the number of ranks of each node."""
    line = [str(MPIRUN)]
    for index, ranks in enumerate(nodes):
        line += [":"] * bool(index) + ["-n", str(ranks), "-env", NODE_NAME, f"node{index}", *command]
    return subprocess.Popen(
        line,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(command: list[str], nodes: tuple[int, ...], **environment: str) -> subprocess.CompletedProcess:
    """As `start`, to the end."""
    process = start(command, nodes, **environment)
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"the ranks did not end:\n{output}\n{errors}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def run_program(name: str, nodes: tuple[int, ...], *arguments: str, **environment: str) -> str:
    """A program that must succeed; its output."""
    result = run([sys.executable, "-m", f"tests.cluster.programs.{name}", *arguments], nodes, **environment)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout
