"""When the next periodic checkpoint is due, and its writing beside the computation."""

import threading
import time
from collections.abc import Callable

from hpcgen.checkpoint.writer import CheckpointFailed

FIRST_RETRY = 30.0
"""Seconds from a failed checkpoint to the next attempt; doubled with each failure, up to the interval."""


class CheckpointSchedule:
    """Due `interval` seconds after the last checkpoint, sooner after one that failed. 0 turns it off."""

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._retry = FIRST_RETRY
        self._next = clock() + interval

    def due(self) -> bool:
        return self._interval > 0 and self._clock() >= self._next

    def succeeded(self) -> None:
        self._retry = FIRST_RETRY
        self._next = self._clock() + self._interval

    def failed(self) -> None:
        self._next = self._clock() + min(self._retry, self._interval)
        self._retry *= 2


class BackgroundWrite:
    """One checkpoint being written by a thread.

    Writing and its checksums leave the interpreter to others; what the engine waits for is the snapshot it took before.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        """`write` may raise CheckpointFailed; anything else is an error of the program and raised by `result`."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> CheckpointFailed | None:
        """Waits for the end; the failure that the run can go on with, or None where it succeeded."""
        self._thread.join()
        if self._error is None or isinstance(self._error, CheckpointFailed):
            return self._error
        raise self._error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
