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

import psutil

from hpcgen.cluster.world import World

STALLED = 70
"""Exit status of a job that was stuck."""
_STANDSTILL = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
PATIENCE_OF_WAITERS = 10.0
"""Seconds by which a rank that waits for others is slower to end the job than one that computes."""


class Watchdog:
    """Started by `watch`. `enter` and `waiting` are cheap: they may be called at every step."""

    def __init__(self, world: World, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`timeout`: seconds without progress; None never ends the job."""
        self._world, self._timeout, self._clock = world, timeout, clock
        self._mates: dict[int, int] = {}
        self._phase, self._waits_for, self._since = "start", "", clock()
        self._stop = threading.Event()
        self.still_missing: Callable[[], str] = lambda: ""
        """Which ranks are waited for, as far as is known."""
        self.waited = 0.0
        """Seconds that this rank has waited for others."""

    def know_node(self) -> None:
        """Who the other ranks of the node are, to see whether they run. Collective."""
        assert self._world.node is not None
        pids = self._world.node.allgather(os.getpid())
        self._mates = {r: pid for r, pid in zip(self._world.local_ranks, pids, strict=True) if r != self._world.rank}

    def enter(self, phase: str) -> None:
        """The rank begins this, or has made progress in it."""
        self._phase, self._waits_for, self._since = phase, "", self._clock()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The rank waits for `what`, which others have to do; `still_missing` may say more."""
        begin = self._clock()
        self._waits_for, self._since = what, begin
        try:
            yield
        finally:
            self._waits_for, self._since = "", self._clock()
            self.waited += self._since - begin

    @property
    def stalled(self) -> str | None:
        """What is stuck, once it is."""
        if self._timeout is None:
            return None
        waits_for, silent = self._waits_for, self._clock() - self._since
        if silent < self._timeout + (PATIENCE_OF_WAITERS if waits_for else 0.0):
            return None
        if waits_for:
            suspects = "".join(f"; {suspect}" for suspect in (self.still_missing(), *self._stopped_mates()) if suspect)
            return f"{self._world} has waited {silent:.0f} s in {self._phase} for {waits_for}{suspects}"
        return f"{self._world} is stuck in {self._phase}: no progress for {silent:.0f} s"

    def _stopped_mates(self) -> list[str]:
        """Those that are stopped, as by a debugger or SIGSTOP, or gone."""
        found = []
        for rank, pid in self._mates.items():
            state = psutil.Process(pid).status() if psutil.pid_exists(pid) else psutil.STATUS_DEAD
            if state in _STANDSTILL:
                found.append(f"rank {rank} (process {pid}) is {state}")
        return found

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
