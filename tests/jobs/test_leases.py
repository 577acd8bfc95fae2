import os
import random
import signal
import subprocess
import sys
import time

import pytest

from hpcgen.jobs.leases import Lease, LeaseError, Leases

SUB_BATCHES = 12


def opened(tmp_path, instance="a", expiry=1000.0, sub_batches=SUB_BATCHES):
    return Leases(tmp_path / "leases", instance, expiry).open(10 * sub_batches, size=10)


def silence(tmp_path, instance, seconds):
    """As if the instance had shown no life for so long."""
    path = tmp_path / "leases" / "alive" / instance
    moment = path.stat().st_mtime - seconds
    os.utime(path, (moment, moment))


@pytest.fixture
def a(tmp_path):
    with opened(tmp_path, "a") as leases:
        yield leases


@pytest.fixture
def b(tmp_path, a):
    with opened(tmp_path, "b") as leases:
        yield leases


def acquire(leases, count=1):
    """The sub-batches of as many leases as there are, `count` at most."""
    acquired = (leases.acquire() for _ in range(count))
    return [lease.sub_batch for lease in acquired if lease is not None]


def test_sub_batches_are_given_out_in_order_and_once(a, b):
    assert acquire(a, 3) == [0, 1, 2]
    assert acquire(b, 2) == [3, 4]
    assert acquire(a) == [5]
    assert a.held == [0, 1, 2, 5]


def test_the_last_ones_may_be_fewer_than_asked_for(a, b):
    assert len(acquire(a, 10)) == 10
    assert acquire(b, 10) == [10, 11]
    assert acquire(b, 10) == []


def test_what_is_done_is_known_by_all_with_its_instance(a, b):
    acquire(a, 2)
    acquire(b, 1)
    assert a.complete(1)
    assert b.complete(2)
    assert a.done == b.done == {1: "a", 2: "b"}
    assert a.held == [0]


def test_a_sub_batch_that_is_not_held_cannot_be_completed(a, b):
    acquire(a, 1)
    assert not b.complete(0)
    assert a.complete(0)
    assert a.complete(0)
    assert not b.complete(0)


def test_a_released_sub_batch_is_free_again(a, b):
    acquire(a, 2)
    a.release(0)
    assert acquire(b, 1) == [0]


def test_what_a_dead_instance_held_is_taken_over_once_nothing_is_free(tmp_path, a, b):
    acquire(a, 2)
    silence(tmp_path, "a", 2000)
    assert acquire(b, SUB_BATCHES - 2) == list(range(2, SUB_BATCHES))
    assert [b.acquire(), b.acquire(), b.acquire()] == [Lease(0, "a"), Lease(1, "a"), None]


def test_a_listing_that_is_out_of_date_gives_no_sub_batch_twice(a, b, monkeypatch):
    """As on NFS: a directory still shows for a while what has left it."""
    everything = os.listdir(a.directory / "free")
    listdir = os.listdir
    acquire(a, SUB_BATCHES - 1)
    monkeypatch.setattr(os, "listdir", lambda path: everything if path == b.directory / "free" else listdir(path))
    assert acquire(b, SUB_BATCHES) == [SUB_BATCHES - 1]


def test_results_that_are_lost_make_a_sub_batch_unfinished_again(a, b):
    acquire(a)
    a.complete(0)
    b.reopen(0)
    assert a.done == {0: "a"}
    a.reopen(0)
    assert a.done == {} and a.held == [0]


def test_a_live_instance_is_not_robbed(tmp_path, a, b):
    acquire(a, SUB_BATCHES)
    silence(tmp_path, "a", 500)
    assert acquire(b) == []


def test_an_instance_that_was_only_slow_drops_what_was_taken_over(tmp_path, a, b):
    acquire(a, SUB_BATCHES)
    silence(tmp_path, "a", 2000)
    assert acquire(b, 1) == [0]
    a.beat()
    assert acquire(b, 1) == []
    assert not a.complete(0)
    assert a.complete(1)
    assert b.complete(0)


def test_an_instance_that_is_requeued_has_what_it_held(tmp_path):
    with opened(tmp_path, "a") as before:
        acquire(before, 2)
    with opened(tmp_path, "a") as after:
        assert after.held == [0, 1]
        assert after.complete(1)


def test_the_merge_is_one_instances_work_when_all_is_done(tmp_path, a, b):
    for leases in (a, b):
        for sub_batch in acquire(leases, 6):
            assert not leases.acquire_merge()
            leases.complete(sub_batch)
    assert a.all_done
    assert a.acquire_merge()
    assert not b.acquire_merge()
    assert a.acquire_merge()


def test_the_merge_of_a_dead_instance_is_taken_over(tmp_path, a, b):
    for sub_batch in acquire(a, SUB_BATCHES):
        a.complete(sub_batch)
    assert a.acquire_merge()
    silence(tmp_path, "a", 2000)
    assert b.acquire_merge()
    assert not a.acquire_merge()


def test_an_instance_that_divides_the_run_otherwise_is_refused(tmp_path, a):
    with pytest.raises(LeaseError, match="--sub-batch"):
        opened(tmp_path, "b", sub_batches=5)


def test_a_directory_that_cannot_be_written_is_one_clear_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LeaseError, match="cannot use the leases"):
        Leases(tmp_path / "file" / "leases", "a").open(1, 1)


def test_the_heartbeat_shows_life(tmp_path):
    leases = Leases(tmp_path / "leases", "a", expiry=0.2).open(1, 1)
    silence(tmp_path, "a", 2000)
    alive = tmp_path / "leases" / "alive" / "a"
    limit = time.monotonic() + 30
    while time.time() - alive.stat().st_mtime > 1000:
        assert time.monotonic() < limit
        time.sleep(0.01)
    leases.close()


def test_an_answer_that_was_lost_does_not_lose_the_token(tmp_path, a, monkeypatch):
    """NFS may report that a token is gone which the very same, repeated, request has taken."""
    rename = os.rename

    def lost_answer(source, target):
        rename(source, target)
        raise FileNotFoundError(source)

    monkeypatch.setattr(os, "rename", lost_answer)
    assert acquire(a, 1) == [0]
    assert a.complete(0)
    assert a.done == {0: "a"}


INSTANCE = """
import sys, time, random
from pathlib import Path
from hpcgen.jobs.leases import Leases
directory, name = Path(sys.argv[1]), sys.argv[2]
with Leases(directory / "leases", name, expiry=1.0).open(60, 1) as leases:
    while not (directory / "merged").exists():
        leases.acquire()
        leases.acquire()
        for sub_batch in leases.held:
            time.sleep(random.random() * 0.1)
            result = directory / f"result-{sub_batch}@{name}"
            result.write_text("x")
            if not leases.complete(sub_batch):
                result.unlink()
        if leases.acquire_merge():
            with open(directory / "merged", "w") as file:
                file.write(name)
        time.sleep(0.01)
"""


def test_many_instances_that_are_killed_at_random_finish_everything_once(tmp_path):
    chosen = random.Random(1)
    processes = {}

    def start(name):
        processes[name] = subprocess.Popen([sys.executable, "-c", INSTANCE, str(tmp_path), name])

    try:
        for name in "abcd":
            start(name)
        for number in range(6):
            time.sleep(0.15 + 0.2 * chosen.random())
            name = chosen.choice([name for name in processes if processes[name].poll() is None] or ["a"])
            processes[name].send_signal(signal.SIGKILL)
            processes[name].wait()
            start(name if number % 2 else f"new{number}")
        for process in processes.values():
            assert process.wait(60) in (0, -signal.SIGKILL)
    finally:
        for process in processes.values():
            process.kill()
    with Leases(tmp_path / "leases", "looker").open(60, 1) as leases:
        done = leases.done
        assert sorted(done) == list(range(60))
    # A kill between the result and its token leaves a result that does not count; the one that counts is there.
    assert all((tmp_path / f"result-{number}@{name}").exists() for number, name in done.items())
    assert (tmp_path / "merged").exists()
