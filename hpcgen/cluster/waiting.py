"""How a rank waits for others: it gives its core away, for a rank that shares it may be the one that is waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_AWAKE = 0.01
"""Seconds during which whoever else wants the core gets it, and an answer is still seen at once."""
_LONGEST_PAUSE = 0.001


def until(arrived: Callable[[], T | None]) -> T:
    """What `arrived` gives, once that is neither None nor False. It may raise."""
    asleep_from, pause = 0.0, 0.00005
    while True:
        found = arrived()
        if found is not None and found is not False:
            return found
        now = time.monotonic()
        asleep_from = asleep_from or now + _AWAKE
        if now < asleep_from:
            os.sched_yield()
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)


def wait(request: MPI.Request) -> None:
    """Returns when the request is complete; Python's signal handlers run meanwhile."""
    until(request.Test)


def receive(comm: MPI.Intracomm, tag: int, source: int | None = None) -> Any:
    """The next object that was sent here, by anybody where no source is given."""
    if source is None:
        from mpi4py import MPI

        source = MPI.ANY_SOURCE
    return until(lambda: comm.improbe(source, tag)).recv()
