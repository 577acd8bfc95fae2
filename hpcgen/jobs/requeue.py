"""The end of a batch script: puts the job back in the queue where its run stopped but is not done.

    trap stopped=--stopped TERM USR2
    ...
    python -m hpcgen.jobs.requeue $? RUN_DIR --max-requeues N $stopped; exit $?

The script does this, not the program: then also a run is requeued that was hit by the signal before Python could
handle it. What Slurm requeues by itself (preemption that kills, node failure) does not come here.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcgen.jobs import slurm
from hpcgen.jobs.signals import INTERRUPTED, STOP_SIGNALS

DEFAULT_MAX_REQUEUES = 1000
_STOPPED = {0, INTERRUPTED, *(128 + number for number in STOP_SIGNALS)}
"""Exit status of a run that left after its checkpoint, or that a stop signal killed during start-up; 0 without a
success marker is a launcher's that lost its ranks: srun and mpirun do that."""


def decide(
    status: int, complete: bool, restarts: int, max_requeues: int, state: str, stopped: bool = False
) -> tuple[bool, str]:
    """Whether to requeue, and a line that says why, or why not.

    Args:
        status: exit status of the run.
        complete: whether the run has its success marker.
        restarts: how often the job has been requeued so far, by anyone.
        state: of the job, as Slurm has it.
        stopped: whether the batch shell got a stop signal too; srun kills ranks that it has not quite started then.
    """
    if complete:
        return False, "the run is complete"
    if status not in _STOPPED and not stopped:
        return False, f"the run ended with exit status {status}, which no requeue mends"
    if state not in slurm.RUNNING_STATES:
        return False, f"the job is {state.lower()}"
    if restarts >= max_requeues:
        return False, f"the job was requeued {restarts} times; `hpcgen resume` continues it (see --max-requeues)"
    return True, f"requeued (restart {restarts + 1} of at most {max_requeues})"


def main(argv: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Requeues or not; returns the exit status for the batch script: 0 if the run is complete and only then."""
    parser = argparse.ArgumentParser(prog="python -m hpcgen.jobs.requeue", description=__doc__)
    parser.add_argument("status", type=int)
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--max-requeues", type=int, default=DEFAULT_MAX_REQUEUES)
    parser.add_argument("--stopped", action="store_true")
    arguments = parser.parse_args(argv)
    # The requeue ends this very job: the message must be out before, and the script's own end is of no matter then.
    for number in (*STOP_SIGNALS, signal.SIGCONT):
        signal.signal(number, signal.SIG_IGN)
    complete = (arguments.run_directory / "SUCCESS").exists()
    status = arguments.status or (0 if complete else 1)
    if complete and arguments.status in _STOPPED:
        status = 0  # another instance has done the rest
    own = slurm.job_id(environment)
    if own is None:
        return status
    try:
        found = slurm.jobs(own)
        state = found[0].state if found else "UNKNOWN"
        restarts = int(environment.get("SLURM_RESTART_COUNT", 0))
        again, reason = decide(arguments.status, complete, restarts, arguments.max_requeues, state, arguments.stopped)
        print(f"hpcgen: {reason}", flush=True)
        if again:
            slurm.requeue(own)
    except slurm.SlurmError as error:
        print(f"hpcgen: the job could not be requeued: {error}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
