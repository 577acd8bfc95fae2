from pathlib import Path

import pytest

from hpcgen.jobs.doctor.check import Level
from hpcgen.jobs.doctor.storage import clock_skew, run_directory


def test_a_file_system_that_works_has_four_findings(tmp_path: Path) -> None:
    assert [check.name for check in run_directory(tmp_path)] == ["rename", "fsync", "write speed", "clock"]


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (check,) = run_directory(tmp_path / "missing")
    assert check.level is Level.ERROR and "No such file" in check.finding


@pytest.mark.parametrize(("ahead", "level"), [(0.0, Level.OK), (60.0, Level.WARNING), (-60.0, Level.WARNING)])
def test_a_clock_that_is_off_is_a_warning_in_either_direction(tmp_path: Path, ahead: float, level: Level) -> None:
    import time

    assert clock_skew(tmp_path, lambda: time.time() + ahead).level is level
