"""A lock is held by one, given back, and taken from the dead only."""

import os
import time
from pathlib import Path

from hpcgen.model import conversion_lock
from hpcgen.model.conversion_lock import STALE_AFTER, ConversionLock
from hpcgen.model.process_identity import own_identity

ELSEWHERE = "another-node~4026531836~123~4567"


def test_a_held_lock_is_not_given_to_another(tmp_path: Path) -> None:
    first, second = ConversionLock(tmp_path / "lock"), ConversionLock(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire()
    first.release()
    assert second.acquire()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_dead_process_of_this_machine_is_taken_at_once(tmp_path: Path) -> None:
    host, namespace, _, _ = own_identity().split("~")
    (tmp_path / "lock").write_text(f"{host}~{namespace}~{os.getpid()}~1")  # this number, but an earlier process
    assert ConversionLock(tmp_path / "lock").acquire()


def test_another_nodes_lock_is_respected_while_its_heart_beats(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(ELSEWHERE)
    lock = ConversionLock(tmp_path / "lock")
    assert not lock.acquire()
    assert lock.holder() == "process 123 on another-node"
    silent_since = time.time() - STALE_AFTER - 60
    os.utime(tmp_path / "lock", (silent_since, silent_since))
    assert lock.acquire()
    lock.release()


def test_a_lock_without_a_name_in_it_is_respected_until_it_is_stale(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    assert not ConversionLock(tmp_path / "lock").acquire()


def test_a_holder_keeps_its_lock_fresh(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(conversion_lock, "HEARTBEAT", 0.01)
    lock = ConversionLock(tmp_path / "lock")
    assert lock.acquire()
    os.utime(tmp_path / "lock", (0, 0))
    while (tmp_path / "lock").stat().st_mtime == 0:
        time.sleep(0.01)
    lock.release()


def test_a_lock_that_was_taken_over_is_not_removed_by_its_first_holder(tmp_path: Path) -> None:
    lock = ConversionLock(tmp_path / "lock")
    assert lock.acquire()
    (tmp_path / "lock").write_text(ELSEWHERE)
    lock.release()
    assert (tmp_path / "lock").read_text() == ELSEWHERE
