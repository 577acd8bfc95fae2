import errno
import os
from pathlib import Path

import pytest

from hpcgen.jobs.doctor.check import Level
from hpcgen.jobs.doctor.storage import clock_skew, room, run_directory, weight_cache


def test_a_file_system_that_works_has_nothing_to_mend(tmp_path: Path) -> None:
    found = run_directory(tmp_path)
    assert [check.name for check in found] == ["rename", "hard links", "fsync", "write speed", "space", "clock"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_hard_links_cannot_hold_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, place: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (check,) = [check for check in run_directory(tmp_path) if check.name == "hard links"]
    assert check.level is Level.ERROR and "not permitted" in check.finding


def test_a_disk_that_is_nearly_full_is_a_warning(tmp_path: Path) -> None:
    assert room(tmp_path, free=2**30).level is Level.WARNING
    assert room(tmp_path, free=2**40).level is Level.OK


def test_the_weight_cache_is_looked_at_before_it_is_made(tmp_path: Path) -> None:
    assert weight_cache(tmp_path / "new" / "cache").level in (Level.OK, Level.WARNING)
    assert not (tmp_path / "new").exists()
    assert weight_cache(Path("/proc/self/status")).level is Level.ERROR


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (check,) = run_directory(tmp_path / "missing")
    assert check.level is Level.ERROR and "No such file" in check.finding


@pytest.mark.parametrize(("ahead", "level"), [(0.0, Level.OK), (60.0, Level.WARNING), (-60.0, Level.WARNING)])
def test_a_clock_that_is_off_is_a_warning_in_either_direction(tmp_path: Path, ahead: float, level: Level) -> None:
    import time

    assert clock_skew(tmp_path, lambda: time.time() + ahead).level is level
