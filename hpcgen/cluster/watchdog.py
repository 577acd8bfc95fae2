"""Ends a job that is stuck: a thread on each rank that knows what the rank does, and since when.

The rank that hangs says so itself, with its stack. Ranks that wait for others give it the time to be first; where it
cannot speak (stopped, its node lost) they say what they wait for.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcgen.cluster.world import World

STALLED = 70
"""Exit status of a job that was stuck."""
PATIENCE_OF_WAITERS = 10.0
"""Seconds by which a rank that waits for others is slower to end the job than one that computes."""


class Watchdog:
    """Started by `watch`. `enter` and `waiting` are cheap: they may be called at every step."""

    def __init__(self, world: World, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`timeout`: seconds without progress; None never ends the job."""
        self._world, self._timeout, self._clock = world, timeout, clock
        self._phase, self._waits_for, self._since = "start", "", clock()
        self._stop = threading.Event()

    def enter(self, phase: str) -> None:
        """The rank begins this, or has made progress in it."""
        self._phase, self._waits_for, self._since = phase, "", self._clock()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The rank waits for `what`, which others have to do."""
        self._waits_for, self._since = what, self._clock()
        try:
            yield
        finally:
            self._waits_for, self._since = "", self._clock()

    @property
    def stalled(self) -> str | None:
        """What is stuck, once it is."""
        if self._timeout is None:
            return None
        waits_for, silent = self._waits_for, self._clock() - self._since
        if silent < self._timeout + (PATIENCE_OF_WAITERS if waits_for else 0.0):
            return None
        if waits_for:
            return f"{self._world} has waited {silent:.0f} s in {self._phase} for {waits_for}"
        return f"{self._world} is stuck in {self._phase}: no progress for {silent:.0f} s"

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watches while the block runs."""
        if self._timeout is None:
            yield
            return
        self._since = self._clock()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _watch(self) -> None:
        assert self._timeout is not None
        while not self._stop.wait(min(1.0, self._timeout / 4)):
            if (problem := self.stalled) is not None:
                print(
                    f"hpcgen: {problem}; its stacks follow. The same command continues; --stall-timeout sets the time.",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(sys.stderr)
                # MPI.Abort may wait for a lock that the stuck thread holds; a launcher ends all ranks when one is gone.
                os._exit(STALLED)
