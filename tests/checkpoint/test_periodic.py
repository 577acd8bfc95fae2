import threading

import pytest

from hpcgen.checkpoint import BackgroundWrite, CheckpointFailed, CheckpointSchedule
from hpcgen.checkpoint.periodic import FIRST_RETRY


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_checkpoint_is_due_when_the_interval_has_passed_since_the_last():
    clock = Clock()
    schedule = CheckpointSchedule(600, clock)
    assert not schedule.due()
    clock.now = 600
    assert schedule.due()
    clock.now = 650
    schedule.succeeded()
    clock.now = 1249
    assert not schedule.due()
    clock.now = 1250
    assert schedule.due()


def test_after_a_failure_it_is_tried_sooner_and_then_ever_less_often():
    clock = Clock()
    schedule = CheckpointSchedule(600, clock)
    waits = []
    for _ in range(7):
        schedule.failed()
        begin = clock.now
        while not schedule.due():
            clock.now += 1
        waits.append(clock.now - begin)
    assert waits == [FIRST_RETRY, 60, 120, 240, 480, 600, 600]
    schedule.succeeded()
    schedule.failed()
    clock.now += FIRST_RETRY
    assert schedule.due()


def test_an_interval_of_zero_turns_it_off():
    clock = Clock()
    schedule = CheckpointSchedule(0, clock)
    clock.now = 1e9
    assert not schedule.due()


def test_the_engine_is_not_held_up_while_a_checkpoint_is_written():
    release, written = threading.Event(), []

    def write():
        release.wait(30)
        written.append(1)
        return "file"

    background = BackgroundWrite(write)
    assert not background.finished
    release.set()
    assert background.result() == "file"
    assert background.finished
    assert written == [1]


def test_a_failed_checkpoint_is_reported_and_an_error_of_the_program_raised():
    def full():
        raise CheckpointFailed("full")

    def broken():
        raise ZeroDivisionError

    assert isinstance(BackgroundWrite(full).result(), CheckpointFailed)
    with pytest.raises(ZeroDivisionError):
        BackgroundWrite(broken).result()
