"""Plain `lm_eval --model hpcgen`, in an environment of its own."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def python(tmp_path, cache):
    """Runs a Python with all packages of this one, and nothing that Python runs at its start."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HPCGEN_CACHE": str(cache), "HF_HOME": str(tmp_path)}

    def run(*words):
        command = [tmp_path / "venv/bin/python", *map(str, words)]
        return subprocess.run(
            command, env=environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=240
        )

    return run


def test_after_registration_the_command_of_the_harness_has_the_model(python, directory, task):
    command = ("-m", "lm_eval", "--model", "hpcgen", "--model_args", f"model={directory},dtype=float32,max_length=60")
    command += ("--tasks", "tiny_choice", "--include_path", task)
    assert python("-m", "hpcgen.cli", "evaluate", "--register").returncode == 0
    done = python(*command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|tiny_choice|" in done.stdout


def test_registration_imports_nothing_and_survives_the_package_and_can_be_undone(python, tmp_path):
    look = ("-c", "import sys; print([type(finder).__name__ for finder in sys.meta_path], 'hpcgen' in sys.modules)")
    python("-m", "hpcgen.cli", "evaluate", "--register")
    registered = python(*look)
    assert "ModelsFinder" in registered.stdout and "False" in registered.stdout
    (file,) = tmp_path.glob("venv/lib/python*/site-packages/hpcgen_lm_eval.pth")
    file.write_text(file.read_text().replace("import_hook", "gone"))
    gone = python(*look)
    assert "ModelsFinder" not in gone.stdout and gone.stderr == ""
    python("-m", "hpcgen.cli", "evaluate", "--unregister")
    assert not file.exists()


def test_other_modules_are_found_as_before():
    script = (
        "import hpcgen.evaluation.import_hook, json, sys, csv; assert type(sys.meta_path[0]).__name__ == 'ModelsFinder'"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}
    )
