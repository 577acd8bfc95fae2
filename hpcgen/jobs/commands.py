"""The commands that send runs to Slurm and look after them: submit, status, logs, cancel, resume, list,
and `checkpoint show`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from hpcgen.errors import HpcgenError

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class NothingToDo(HpcgenError):
    """The command does not apply to the run as it stands."""


def add_job_parsers(subparsers: Subparsers, add_run_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds all commands; each sets `call`, which takes the parsed arguments and returns the exit status.

    Args:
        add_run_arguments: adds those of `hpcgen run`, which `submit` takes too.
    """
    _add_submit(subparsers, add_run_arguments)
    for name, call, help_text in (
        ("status", _status, "how a run stands"),
        ("cancel", _cancel, "cancel the jobs of a run; what is finished or in a checkpoint is kept"),
        ("resume", _resume, "submit a run again that has stopped"),
    ):
        parser = subparsers.add_parser(name, help=help_text, description=help_text)
        parser.add_argument("run_directory", type=Path, metavar="RUN_DIR")
        parser.set_defaults(call=call)
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


def _add_submit(subparsers: Subparsers, add_run_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
    parser = subparsers.add_parser(
        "submit",
        help="run a batch as a Slurm job",
        description="Submit a run to Slurm. The job survives preemption, its time limit and lost nodes: it is requeued "
        "and goes on where it was. Values come from the `slurm:` section of a cluster file; what is given here counts.",
    )
    add_run_arguments(parser)
    job = parser.add_argument_group("job")
    job.add_argument("--cluster", metavar="NAME|FILE", help="cluster file, by path or by name from configs/clusters")
    job.add_argument("--nodes", type=int, help="nodes of an instance (default: 1)")
    job.add_argument("--gpus-per-node", type=int, help="GPUs of each node; as many ranks run there")
    job.add_argument("--tasks-per-node", type=int, help="MPI ranks on a node (default: one for each GPU, else one)")
    job.add_argument("--cpus-per-task", type=int, help="cores of each rank")
    job.add_argument("--mem", help="host memory on each node, as for sbatch")
    job.add_argument("--partition", help="where to queue")
    job.add_argument("--account", help="whom to charge")
    job.add_argument("--qos", help="quality of service")
    job.add_argument("--time", help="limit of one stay; longer runs are requeued (default: 1:00:00)")
    job.add_argument("--constraint", help="features that the nodes must have")
    job.add_argument("--reservation", help="reservation to run in")
    job.add_argument("--job-name", help="name in the queue")
    job.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION[=VALUE]", help="further option of sbatch, repeatable"
    )
    job.add_argument("--srun", action="append", metavar="ARGUMENT", help="further argument of srun, repeatable")
    job.add_argument(
        "--setup", action="append", metavar="LINE", help="line of shell before the ranks start, repeatable"
    )
    job.add_argument(
        "--signal-seconds", type=int, help="the stop signal comes this long before the time limit (default: 120)"
    )
    job.add_argument("--max-requeues", type=int, help="after so many, the job stays stopped (default: 1000)")
    job.add_argument("--dry-run", action="store_true", help="print the batch script, submit nothing")
    parser.set_defaults(call=_submit, add_run_arguments=add_run_arguments)


JOB_ARGUMENTS = (
    "nodes", "gpus_per_node", "tasks_per_node", "cpus_per_task", "mem", "partition", "account", "qos", "time",
    "constraint", "reservation", "job_name", "srun", "setup", "signal_seconds", "max_requeues",
)  # fmt: skip
"""Arguments of `submit` that are options of the job, named as in SlurmOptions."""


def _submit(arguments: argparse.Namespace) -> int:
    from hpcgen.batch.source import TemplateOptions, open_source, parse_body
    from hpcgen.jobs import preflight
    from hpcgen.jobs.submission import batch_script, load_cluster_file, merge_options, submit

    cluster = load_cluster_file(arguments.cluster) if arguments.cluster else {}
    given = {name: getattr(arguments, name) for name in JOB_ARGUMENTS}
    given["sbatch"] = dict(_sbatch_option(text) for text in arguments.sbatch) or None
    options = merge_options(cluster.get("slurm", {}), given)
    run_directory = (arguments.run_dir or arguments.output.with_suffix(".run")).absolute()
    run_arguments = arguments_of_run(arguments, arguments.add_run_arguments)
    if arguments.dry_run:
        print(batch_script(options, run_directory, run_arguments), end="")
        return 0
    weight_bytes = preflight.check_model(arguments.model)
    preflight.check_memory(weight_bytes, preflight.node_memory(options.mem, cluster), _say)
    template = TemplateOptions(arguments.template, arguments.column, parse_body(arguments.body), arguments.completions)
    source = open_source(arguments.input, run_directory, template)
    batch_input = preflight.check_input(source.requests, _say)
    preflight.check_run_directory(run_directory, batch_input, arguments.model, arguments.output)
    submission = submit(options, run_directory, run_arguments)
    print(f"job            {submission.job_id}")
    print(f"run directory  {run_directory}")
    print(f"watch it with  hpcgen status {run_directory}; hpcgen logs -f {run_directory}")
    return 0


def arguments_of_run(
    arguments: argparse.Namespace, add_run_arguments: Callable[[argparse.ArgumentParser], None]
) -> list[str]:
    """The arguments of `hpcgen`, from `run` on, that mean the same from any directory; defaults are left out."""
    parser = argparse.ArgumentParser(add_help=False)
    add_run_arguments(parser)
    values: dict[str, Any] = vars(arguments) | {"run_dir": arguments.run_dir or arguments.output.with_suffix(".run")}
    words = ["run"]
    for action in parser._actions:
        value = values[action.dest]
        if value == action.default:
            continue
        option = action.option_strings[0]
        if isinstance(action, argparse.BooleanOptionalAction):
            words.append(option if value else action.option_strings[-1])
        elif action.nargs == 0:
            words.append(option)
        else:
            for each in value if isinstance(value, list) else [value]:
                words += [option, str(each.absolute() if isinstance(each, Path) else each)]
    return words


def _sbatch_option(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.lstrip("-").partition("=")
    return name, value if equals else True


def _status(arguments: argparse.Namespace) -> int:
    from hpcgen.jobs.status import read_state, render

    print(render(read_state(arguments.run_directory)))
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
    if state.slurm_error is not None:
        raise slurm.SlurmError(state.slurm_error)
    if not state.active:
        raise NothingToDo(f"the run in {state.path} has no job that waits or runs")
    for job in sorted({job.id.split("_")[0] for job in state.active}):
        slurm.cancel(job)
        print(f"cancelled job {job}")
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    import msgspec

    from hpcgen.jobs import slurm
    from hpcgen.jobs.status import read_state
    from hpcgen.jobs.submission import SlurmOptions, submit

    state = read_state(arguments.run_directory)
    if state.slurm_error is not None:
        raise slurm.SlurmError(state.slurm_error)
    if state.complete:
        raise NothingToDo(f"the run in {state.path} is complete")
    if state.active:
        raise NothingToDo(f"job {state.active[0].id} of the run in {state.path} still waits or runs")
    if not state.submissions:
        raise NothingToDo(f"the run in {state.path} was not submitted; give the same `hpcgen run` command again")
    last = state.submissions[-1]
    submission = submit(msgspec.convert(last.slurm, SlurmOptions), state.path.absolute(), last.arguments)
    print(f"job            {submission.job_id}")
    return 0


def _show_checkpoint(arguments: argparse.Namespace) -> int:
    from hpcgen.checkpoint.show import show

    print(show(arguments.path))
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
