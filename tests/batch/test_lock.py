import os
import subprocess
import sys
import threading

import msgspec
import psutil
import pytest

from hpcgen.batch.lock import DirectoryLock, LockedError, Owner

HOLDER = """
import sys, time
from pathlib import Path
from hpcgen.batch.lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


def lock_of(directory, number=1, **owner):
    """A lock file that another process has left."""
    owner = {"host": "elsewhere", "pid": 1, "started": 0.0, "nonce": "x"} | owner
    path = directory / f"lock.{number:08d}"
    path.write_bytes(msgspec.json.encode(Owner(**owner)))
    return path


def test_a_second_process_is_refused_until_the_first_one_is_dead(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(LockedError, match=f"in use by process {holder.pid} on "):
            DirectoryLock(tmp_path)
        holder.kill()
        holder.wait()
    DirectoryLock(tmp_path).release()


def test_a_released_lock_can_be_taken_again(tmp_path):
    for _ in range(3):
        DirectoryLock(tmp_path).release()
    assert [path.name for path in tmp_path.iterdir()] == ["lock.00000003"]


def test_a_lock_of_this_process_is_refused_too(tmp_path):
    lock = DirectoryLock(tmp_path)
    with pytest.raises(LockedError):
        DirectoryLock(tmp_path)
    lock.release()


def test_a_process_on_another_host_is_alive_while_it_touches_its_lock(tmp_path):
    path = lock_of(tmp_path)
    touched = threading.Timer(0.1, lambda: os.utime(path, (1.0, path.stat().st_mtime + 1)))
    touched.start()
    with pytest.raises(LockedError, match="on elsewhere"):
        DirectoryLock(tmp_path, expiry_seconds=60)
    touched.join()


def test_a_process_on_another_host_that_stays_silent_is_waited_for(tmp_path):
    lock_of(tmp_path)
    DirectoryLock(tmp_path, expiry_seconds=0.2).release()


def test_a_job_that_slurm_requeued_on_another_host_goes_on_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lock_of(tmp_path, job="5", restart=0)
    DirectoryLock(tmp_path).release()


def test_a_process_on_another_host_is_dead_when_its_lock_is_old(tmp_path):
    path = lock_of(tmp_path)
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1000))
    DirectoryLock(tmp_path).release()


def test_a_process_id_that_was_given_again_is_not_the_owner(tmp_path):
    process = psutil.Process()
    lock_of(tmp_path, host=os.uname().nodename, pid=process.pid, started=process.create_time() - 100)
    DirectoryLock(tmp_path).release()


def test_who_was_taken_over_notices_and_leaves_the_new_lock_alone(tmp_path):
    lock = DirectoryLock(tmp_path)
    lock.check()
    new = lock_of(tmp_path, number=2)
    content = new.read_bytes()
    lock.beat()
    with pytest.raises(LockedError, match=r"took .* over"):
        lock.check()
    lock.release()
    assert new.read_bytes() == content


def test_a_beat_makes_the_lock_fresh(tmp_path):
    lock = DirectoryLock(tmp_path)
    path = tmp_path / "lock.00000001"
    os.utime(path, (0, 0))
    lock.beat()
    assert path.stat().st_mtime > 1e9
    lock.release()


def test_of_many_that_come_at_once_one_gets_the_lock(tmp_path):
    stale = lock_of(tmp_path, number=7)
    os.utime(stale, (0, 0))
    start = threading.Barrier(8)
    locks, refused = [], []

    def try_it():
        start.wait()
        try:
            locks.append(DirectoryLock(tmp_path))
        except LockedError:
            refused.append(1)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(locks), len(refused)) == (1, 7)
    locks[0].release()


def test_nothing_is_left_but_the_lock(tmp_path):
    lock = DirectoryLock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock.00000001"]
    lock.release()
