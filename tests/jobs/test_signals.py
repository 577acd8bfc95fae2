import os
import signal
import subprocess
import sys

import pytest

from hpcgen.jobs.signals import GRACE_OUTSIDE_SLURM, INTERRUPTED, STOP_SIGNALS, Interrupted, PreemptionSignals


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def signals(clock):
    installed = PreemptionSignals(lambda: None, clock).install()
    yield installed
    installed.restore()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_either_signal_alone_asks_for_a_stop(signals, number):
    assert not signals.requested
    signals.check()
    os.kill(os.getpid(), number)
    assert signals.requested
    assert signals.name == number.name
    with pytest.raises(Interrupted, match=number.name):
        signals.check()


def test_the_first_signal_counts_and_later_ones_do_no_harm(signals, clock):
    os.kill(os.getpid(), signal.SIGUSR2)
    clock.now += 20
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.name == "SIGUSR2"
    assert signals.deadline(grace=60) == 160


def test_without_a_word_from_anyone_a_usual_grace_is_assumed(signals):
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.deadline() == 100 + GRACE_OUTSIDE_SLURM


def test_the_clusters_word_counts_from_now(clock):
    signals = PreemptionSignals(lambda: 40.0, clock).install()
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        clock.now += 5
        assert 100 < signals.deadline() <= 145
    finally:
        signals.restore()


def test_a_deadline_that_has_passed_is_now(clock):
    signals = PreemptionSignals(lambda: -10.0, clock).install()
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.deadline() == clock.now
    finally:
        signals.restore()


def test_there_is_no_deadline_before_a_signal(signals):
    with pytest.raises(ValueError):
        signals.deadline()


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGUSR2)
    PreemptionSignals().install().restore()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_stopped_run_has_an_exit_status_of_its_own():
    assert Interrupted("x").exit_code == INTERRUPTED == os.EX_TEMPFAIL


def test_the_current_signals_are_there_before_anything_slow_is_imported():
    program = (
        "import os, signal, sys; from hpcgen.jobs.signals import current; first = current();"
        "os.kill(os.getpid(), signal.SIGUSR2); assert current() is first; assert first.requested;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_signal_that_comes_while_python_ends_does_not_change_the_exit_status():
    program = """
import os, signal, sys
from hpcgen.jobs.signals import Interrupted, current
current()
os.kill(os.getpid(), signal.SIGUSR2)
try:
    current().check()
except Interrupted as error:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # as the interpreter does
    os.kill(os.getpid(), signal.SIGUSR2)
    sys.exit(error.exit_code)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == INTERRUPTED
