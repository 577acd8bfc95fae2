from pathlib import Path

import pytest

from hpcgen.cli import main
from hpcgen.jobs.doctor import Check, Level, checks, exit_code, render


def test_a_machine_has_a_finding_for_everything_and_a_remedy_for_all_that_is_wrong(tmp_path: Path) -> None:
    found = checks(tmp_path)
    assert {check.name for check in found} >= {
        "cores", "memory", "space", "weight cache",
        "memlock", "shared memory", "huge pages", "CPU kernels", "GPU", "flashinfer", "deep_ep", "rename", "fsync",
        "write speed", "clock", "Slurm",
    }  # fmt: skip
    assert all(check.remedy for check in found if check.level in (Level.WARNING, Level.ERROR))
    assert list(tmp_path.iterdir()) == []


def test_findings_of_other_rooms_come_last() -> None:
    mpi = Check("MPI", Level.OK, "agrees with the launcher")
    assert checks(Path("/nowhere"), [lambda: [mpi]])[-1] == mpi


def test_a_check_that_fails_is_a_finding_and_hides_no_other(tmp_path: Path) -> None:
    def broken() -> list[Check]:
        raise KeyError("x")

    last = checks(tmp_path, [broken, lambda: [Check("MPI", Level.OK, "")]])[-2:]
    assert last[0].level is Level.WARNING and "KeyError" in last[0].finding
    assert last[1].name == "MPI"


def test_only_what_makes_runs_fail_makes_the_command_fail() -> None:
    levels = {level: Check("x", level, "") for level in Level}
    assert exit_code(levels.values()) == 1
    assert exit_code(check for level, check in levels.items() if level is not Level.ERROR) == 0


def test_a_remedy_stands_below_its_finding() -> None:
    text = render([Check("a", Level.OK, "fine"), Check("b", Level.ERROR, "broken", "mend it")])
    assert text.splitlines() == ["ok       a: fine", "error    b: broken", "         -> mend it"]


def test_the_command_fails_where_runs_could_not_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "/proc"]) == 1
    assert "cannot write to /proc" in capsys.readouterr().out
