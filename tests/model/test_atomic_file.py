"""A file written aside is there whole or not at all, and what the dead leave is removed."""

import os
import time
from pathlib import Path

import pytest

from hpcgen.model.atomic_file import ABANDONED_AFTER, age, remove_abandoned, written_aside
from hpcgen.model.process_identity import own_identity


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    destination = tmp_path / "new" / "file"
    with written_aside(destination) as descriptor:
        os.write(descriptor, b"content")
        assert not destination.exists()
    assert destination.read_bytes() == b"content"
    assert list(destination.parent.iterdir()) == [destination]


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), written_aside(tmp_path / "file") as descriptor:
        os.write(descriptor, b"new")
        raise KeyboardInterrupt
    assert (tmp_path / "file").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_partial_files_go_when_their_writers_are_dead(tmp_path: Path) -> None:
    host, namespace, _, _ = own_identity().split("~")
    dead = tmp_path / f".{host}~{namespace}~{os.getpid()}~1@file.partial"
    alive = tmp_path / f".{own_identity()}@file.partial"
    elsewhere = tmp_path / ".another.node~1~2~3@file.partial"
    silent = tmp_path / ".another.node~1~2~4@file.partial"
    unrelated = tmp_path / ".notes.partial"
    for file in (dead, alive, elsewhere, silent, unrelated):
        file.touch()
    os.utime(silent, (time.time() - ABANDONED_AFTER - 60,) * 2)
    remove_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == {alive, elsewhere, unrelated}


def test_age_is_counted_by_the_file_systems_clock(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.utime(tmp_path / "file", (time.time() - 100,) * 2)
    assert 99 < age(tmp_path / "file") < 200
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
