"""How ranks end together: on an exception of one, and on a signal that asks for it."""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType
from typing import TYPE_CHECKING

from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.cluster.world import World

INTERRUPTED = 130


def end_all(world: World, error: BaseException) -> None:
    """Says what `error` was, and ends every rank: the others wait for this one in MPI and cannot be told."""
    assert world.comm is not None
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    elif isinstance(error, HpcgenError):
        code = error.exit_code
        print(f"hpcgen: {error}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
        print("hpcgen: interrupted; what is finished is kept, and the same command continues", file=sys.stderr)
    else:
        code = 1
        print(f"hpcgen: {world} failed:\n{''.join(traceback.format_exception(error))}", file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    world.comm.Abort(code or 1)


def leave_signals_to_rank_0() -> None:
    """For every other rank: a launcher sends a signal to all ranks, and rank 0 ends them in good order."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


class InterruptFlag:
    """Ctrl-C on rank 0: the first is remembered until the ranks have come to a decision, the second interrupts."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> InterruptFlag:
        signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
