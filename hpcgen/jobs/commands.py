"""The commands that look after runs: status, logs, cancel, list, and `checkpoint show`."""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpcgen.jobs.submit_commands import NothingToDo, Subparsers, add_submit_parsers


def add_job_parsers(subparsers: Subparsers, add_run_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds all commands; each sets `call`, which takes the parsed arguments and returns the exit status.

    Args:
        add_run_arguments: adds those of `hpcgen run`, which `submit` takes too.
    """
    add_submit_parsers(subparsers, add_run_arguments)
    status = subparsers.add_parser("status", help="how a run stands", description="How a run stands.")
    status.add_argument("run_directory", type=Path, metavar="RUN_DIR")
    status.add_argument("-f", "--follow", action="store_true", help="show it again and again while jobs wait or run")
    status.add_argument("--interval", type=float, default=5.0, metavar="SECONDS", help="of --follow (default: 5)")
    status.set_defaults(call=_status)
    cancel = subparsers.add_parser(
        "cancel",
        help="cancel the jobs of a run",
        description="Cancel the jobs of a run. What is finished or in a checkpoint is kept; `resume` continues.",
    )
    cancel.add_argument("run_directory", type=Path, metavar="RUN_DIR")
    cancel.add_argument("--instance", metavar="NAME", help="only this one of a shared run; the others take its work")
    cancel.set_defaults(call=_cancel)
    logs = subparsers.add_parser(
        "logs", help="what the jobs of a run printed", description="What the jobs of a run printed, job after job."
    )
    logs.add_argument("run_directory", type=Path, metavar="RUN_DIR")
    logs.add_argument("-f", "--follow", action="store_true", help="go on while jobs wait or run")
    logs.add_argument("-n", "--lines", type=int, metavar="N", help="only the last N lines of each log")
    logs.add_argument("--rank", type=int, default=0, help="default: 0, which reports for all")
    logs.set_defaults(call=_logs)
    listing = subparsers.add_parser(
        "list", help="the runs below a directory", description="A line for each run directory below a directory."
    )
    listing.add_argument("directory", type=Path, nargs="?", default=Path(), metavar="DIR")
    listing.set_defaults(call=_list)


def add_checkpoint_parser(subparsers: Subparsers) -> None:
    """Adds `checkpoint show`."""
    parser = subparsers.add_parser(
        "checkpoint", help="look at checkpoints", description="Look at the checkpoints of a run."
    )
    show = parser.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "show", help="what is in a checkpoint"
    )
    show.add_argument("path", type=Path, metavar="PATH", help="a run directory, its checkpoints/, or an .h5 file there")
    show.set_defaults(call=_show_checkpoint)


def _status(arguments: argparse.Namespace) -> int:
    from hpcgen.jobs.status import follow, read_state, render

    if not arguments.follow:
        print(render(read_state(arguments.run_directory)))
        return 0
    # On a terminal each picture takes the place of the one before.
    begin, end = ("\x1b[H\x1b[J", "\n") if sys.stdout.isatty() else ("", "\n\n")
    with suppress(KeyboardInterrupt):
        follow(
            arguments.run_directory,
            lambda text: print(begin + text, end=end, flush=True),
            max(arguments.interval, 0.2),
            time.sleep,
        )
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from hpcgen.jobs.status import find_runs, read_state, render_list

    runs = find_runs(arguments.directory)
    if not runs:
        raise NothingToDo(f"there is no run in {arguments.directory.absolute()}")
    print(render_list([read_state(run) for run in runs]))
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    from hpcgen.jobs import logs
    from hpcgen.jobs.status import read_state

    directory, rank = arguments.run_directory, arguments.rank
    if not arguments.follow:
        logs.show(directory, sys.stdout, rank, arguments.lines)
        return 0
    shown = logs.show(directory, sys.stdout, rank, arguments.lines) if logs.log_files(directory, rank) else {}
    logs.follow(directory, sys.stdout, shown, lambda: not read_state(directory).active, rank)
    return 0


def _cancel(arguments: argparse.Namespace) -> int:
    from hpcgen.jobs import slurm
    from hpcgen.jobs.status import read_state

    state = read_state(arguments.run_directory)
    state.check_slurm()
    jobs = sorted({job.id.split("_")[0] for job in state.active})
    if arguments.instance is not None:
        jobs = [job.id for job in state.jobs_of(arguments.instance) if not job.ended]
    if not jobs:
        who = f"instance {arguments.instance}" if arguments.instance is not None else "the run"
        raise NothingToDo(f"{who} in {state.path} has no job that waits or runs")
    for job in jobs:
        slurm.cancel(job)
        print(f"cancelled job {job}")
    return 0


def _show_checkpoint(arguments: argparse.Namespace) -> int:
    from hpcgen.batch.run_directory import RunDirectory
    from hpcgen.checkpoint.manifest import epochs
    from hpcgen.checkpoint.show import show

    shared = [part for part in RunDirectory(arguments.path).parts() if part.instance is not None]
    if not shared:
        print(show(arguments.path))
    for part in shared:
        if epochs(part.checkpoints):
            print(f"instance {part.instance}\n{show(part.own)}")
    return 0
