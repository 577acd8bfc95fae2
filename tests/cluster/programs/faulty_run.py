"""`hpcgen run` in which ranks fail at some decision. Arguments: rank:decision,..., what, then those of hpcgen."""

import os
import signal
import sys
import time
from typing import Any

from hpcgen.checkpoint.writer import CheckpointWriter
from hpcgen.cluster.launcher import launch_of
from hpcgen.engine.executor import Executor


def arm(decision: int, what: str) -> None:
    execute = Executor.execute
    decisions = 0

    def faulty(self: Executor, *arguments: Any) -> Any:
        nonlocal decisions
        decisions += 1
        if decisions >= decision:
            fail(what)
        return execute(self, *arguments)

    Executor.execute = faulty  # type: ignore[method-assign]
    if what == "kill in the checkpoint":
        die_in_last_checkpoint()


def die_in_last_checkpoint() -> None:
    """A second signal comes while pages are written, and soon after it the kill."""
    write = CheckpointWriter.write_snapshot
    signals = {3: signal.SIGTERM, 6: signal.SIGKILL}

    def deadly(self: CheckpointWriter, epoch: int, snapshot: Any, pages: Any = None, *more: Any) -> Any:
        read = 0

        def page(number: int) -> Any:
            nonlocal read
            read += 1
            if read in signals:
                os.kill(os.getpid(), signals[read])
            return pages(number)

        return write(self, epoch, snapshot, page if pages is not None else None, *more)

    CheckpointWriter.write_snapshot = deadly  # type: ignore[method-assign]


def fail(what: str) -> None:
    if what == "raise":
        raise ValueError("a fault of the test")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("term", "kill in the checkpoint"):
        os.kill(os.getpid(), signal.SIGTERM)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "hang":
        time.sleep(1000)
    if what == "slow":
        time.sleep(0.3)


if __name__ == "__main__":
    launch = launch_of(os.environ)
    decision_of_rank = dict(map(int, fault.split(":")) for fault in sys.argv[1].split(","))
    if launch is not None and launch.rank in decision_of_rank:
        arm(decision_of_rank[launch.rank], sys.argv[2])
    from hpcgen.cli import main

    sys.exit(main(sys.argv[3:]))
