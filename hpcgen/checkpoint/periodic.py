"""When the next periodic checkpoint is due, and its writing beside the computation."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from hpcgen.checkpoint.writer import CheckpointFailed

Result = TypeVar("Result")

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

    def failed(self) -> float:
        """Seconds until the next attempt."""
        wait = min(self._retry, self._interval)
        self._next = self._clock() + wait
        self._retry *= 2
        return wait


class BackgroundWrite(Generic[Result]):
    """A part of a checkpoint being written by a thread.

    Writing and its checksums leave the interpreter to others; what the engine waits for is the snapshot it took before.
    """

    def __init__(self, write: Callable[[], Result]) -> None:
        """`write` may raise CheckpointFailed; anything else is an error of the program and raised by `result`."""
        self._error: BaseException | None = None
        self._result: Result
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Result | CheckpointFailed:
        """Waits for the end; what `write` gave, or the failure that the run can go on with."""
        self._thread.join()
        if self._error is None:
            return self._result
        if isinstance(self._error, CheckpointFailed):
            return self._error
        raise self._error

    def _run(self, write: Callable[[], Result]) -> None:
        try:
            self._result = write()
        except BaseException as error:
            self._error = error
