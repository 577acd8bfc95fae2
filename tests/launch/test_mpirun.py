import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun here: pip install mpi4py mpich")
def test_all_ranks_are_in_one_world(monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(str(MPIRUN)).parent}:/usr/bin:/bin")
    program = "from mpi4py import MPI; c = MPI.COMM_WORLD; ranks = c.gather(c.rank); c.rank or print(ranks)"
    done = subprocess.run(
        [LAUNCH / "mpirun.sh", "2", sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[0, 1]"


def test_a_container_sees_the_directories_of_the_arguments(tmp_path, monkeypatch):
    apptainer = tmp_path / "apptainer"
    apptainer.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    apptainer.chmod(0o755)
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("APPTAINER", str(apptainer))
    done = subprocess.run(
        [LAUNCH / "apptainer.sh", "image.sif", "hpcgen", "run", "--model", tmp_path / "model"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = done.stdout.split("\n")
    assert words[0] == "exec"
    assert words[words.index(str(tmp_path / "model")) - 1] == "--bind"
    image = words.index("image.sif")
    assert words[image + 1 : image + 5] == ["hpcgen", "run", "--model", str(tmp_path / "model")]
