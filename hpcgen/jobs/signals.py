"""Signals that ask a job to stop: preemption, the coming time limit, or a user. They ask once; the loop polls.

Slurm sends the user signal that sbatch's --signal names (SIGUSR2 here), or, where a cluster lacks
`preempt_send_user_signal`, SIGTERM alone. Both mean: checkpoint and leave. What comes after the first changes nothing:
the kill follows at a time that is known, and the checkpoint is laid out for being cut off.
"""

import signal
import time
from collections.abc import Callable
from types import FrameType

from hpcgen.errors import HpcgenError
from hpcgen.jobs import slurm

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
INTERRUPTED = 75
"""Exit status of a run that stopped on request and can be continued (EX_TEMPFAIL); the batch script requeues on it."""
GRACE_OUTSIDE_SLURM = 30.0
"""Seconds that are taken for granted where nothing says when the kill comes."""
_MARGIN = 1.0
"""Seconds kept for leaving after the checkpoint."""


class Interrupted(HpcgenError):
    """The run stopped because it was asked to; all it had is saved."""

    exit_code = INTERRUPTED


class PreemptionSignals:
    """Remembers the first stop signal. `install` it in the main thread, as early as can be.

    Args:
        time_left: seconds until the kill, as the cluster says; None: unknown.
    """

    def __init__(
        self,
        time_left: Callable[[], float | None] = lambda: _slurm_seconds_left(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._time_left = time_left
        self._clock = clock
        self._first: tuple[signal.Signals, float] | None = None
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """Whether the run shall checkpoint and stop. Cheap: may be asked at every step."""
        return self._first is not None

    @property
    def name(self) -> str:
        """Of the signal that came, such as 'SIGTERM'; empty before."""
        return self._first[0].name if self._first else ""

    def install(self) -> "PreemptionSignals":
        """Handles STOP_SIGNALS from now on."""
        self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def restore(self) -> None:
        """Handles them as before `install`."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def check(self) -> None:
        """Where nothing is lost by leaving. Raises Interrupted if a stop was requested.

        Further signals are held back from then on: one that came while Python ends would change the exit status.
        """
        if self.requested:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            raise Interrupted(f"stopped by {self.name}; the same command continues")

    def deadline(self, grace: float | None = None) -> float:
        """Time of the clock at which a checkpoint must be durable. Asks Slurm: call it once, on one rank.

        Args:
            grace: seconds from the signal that the user says there are; None: what Slurm says.
        """
        if self._first is None:
            raise ValueError("no signal has come")
        if grace is not None:
            return self._first[1] + grace
        left = self._time_left()
        if left is None:
            return self._first[1] + GRACE_OUTSIDE_SLURM
        return self._clock() + max(left - _MARGIN, 0.0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = (signal.Signals(number), self._clock())


_current: PreemptionSignals | None = None


def current() -> PreemptionSignals:
    """The process's own, installed by the first call: by what starts first, before the imports that take seconds."""
    global _current
    if _current is None:
        _current = PreemptionSignals().install()
    return _current


def _slurm_seconds_left() -> float | None:
    own = slurm.job_id()
    return slurm.seconds_left(own) if own else None
