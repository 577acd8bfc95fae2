"""The commands that send jobs to Slurm: submit, resume, add-instances."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.jobs.job_options import SlurmOptions
    from hpcgen.jobs.status import RunState
    from hpcgen.jobs.submission import Submission

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

JOB_ARGUMENTS = (
    "nodes", "gpus_per_node", "tasks_per_node", "cpus_per_task", "mem", "partition", "account", "qos", "time",
    "constraint", "reservation", "job_name", "srun", "setup", "signal_seconds", "max_requeues",
)  # fmt: skip
"""Arguments that are options of the job, named as in SlurmOptions."""


class NothingToDo(HpcgenError):
    """The command does not apply to the run as it stands."""


def add_submit_parsers(subparsers: Subparsers, add_run_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds the commands; each sets `call`, which takes the parsed arguments and returns the exit status.

    Args:
        add_run_arguments: adds those of `hpcgen run`, which `submit` takes too.
    """
    submit = subparsers.add_parser(
        "submit",
        help="run a batch as a Slurm job",
        description="Submit a run to Slurm. The job survives preemption, its time limit and lost nodes: it is requeued "
        "and goes on where it was. Values come from the `slurm:` section of a cluster file; what is given here counts.",
    )
    add_run_arguments(submit)
    job = _add_job_arguments(submit)
    job.add_argument(
        "--instances", type=int, metavar="N",
        help="an array of N jobs that share the run directory, each with its own copy of the model; more can be added",
    )  # fmt: skip
    job.add_argument("--cluster", metavar="NAME|FILE", help="cluster file, by path or by name from configs/clusters")
    job.add_argument("--dry-run", action="store_true", help="print the batch script, submit nothing")
    submit.set_defaults(call=_submit, add_run_arguments=add_run_arguments)

    resume = subparsers.add_parser(
        "resume",
        help="submit a run again that has stopped",
        description="Submit a run again that has stopped. Its job is as before, but for what is given here.",
    )
    resume.add_argument("run_directory", type=Path, metavar="RUN_DIR")
    job = _add_job_arguments(resume)
    job.add_argument("--instances", type=int, metavar="N", help="of a shared run (default: as many as it had)")
    resume.set_defaults(call=_resume)

    more = subparsers.add_parser(
        "add-instances",
        help="more jobs for a run that instances share",
        description="Submit further instances to a run that was submitted with --instances; those it has go on. "
        "The jobs are as the last ones, but for what is given here.",
    )
    more.add_argument("run_directory", type=Path, metavar="RUN_DIR")
    more.add_argument("count", type=int, metavar="N")
    _add_job_arguments(more)
    more.set_defaults(call=_add_instances)


def _add_job_arguments(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    job = parser.add_argument_group("job")
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
    return job


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of the job from the command line; None where the user says nothing."""
    given: dict[str, Any] = {name: getattr(arguments, name) for name in JOB_ARGUMENTS}
    given["sbatch"] = dict(_sbatch_option(text) for text in arguments.sbatch) or None
    return given


def _sbatch_option(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.lstrip("-").partition("=")
    return name, value if equals else True


def _submit(arguments: argparse.Namespace) -> int:
    from hpcgen.batch.source import TemplateOptions, open_source, parse_body
    from hpcgen.jobs import preflight
    from hpcgen.jobs.job_options import load_cluster_file, merge_options
    from hpcgen.jobs.submission import batch_script, submit
    from hpcgen.planner.defaults import predicted_by_data_sheet

    cluster = load_cluster_file(arguments.cluster) if arguments.cluster else {}
    options = merge_options(cluster.get("slurm", {}), _given(arguments) | {"instances": arguments.instances})
    run_directory = (arguments.run_dir or arguments.output.with_suffix(".run")).absolute()
    run_arguments = arguments_of_run(arguments, arguments.add_run_arguments)
    script = batch_script(options, run_directory, run_arguments)
    if arguments.dry_run:
        print(script, end="")
        return 0
    weight_bytes = preflight.check_model(arguments.model)
    preflight.check_memory(weight_bytes, preflight.node_memory(options, cluster), _say)
    template = TemplateOptions(arguments.template, arguments.column, parse_body(arguments.body), arguments.completions)
    source = open_source(arguments.input, run_directory, template)
    batch_input = preflight.check_input(source.requests, _say)
    decisive = {name: getattr(arguments, name) for name in ("seed", "max_model_len", "dtype", "sub_batch")}
    preflight.check_run_directory(
        run_directory, batch_input, arguments.model, arguments.output, decisive, shared=options.instances is not None
    )
    preflight.check_job(options, script)
    _show(submit(options, run_directory, run_arguments))
    if arguments.cluster:
        ranks = options.nodes * options.ranks_per_node
        said = predicted_by_data_sheet(arguments.model, source.requests, len(batch_input), arguments.cluster, ranks)
        if said is not None:
            print(f"planned        {said}")
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


def _resume(arguments: argparse.Namespace) -> int:
    from hpcgen.jobs.job_options import merge_options
    from hpcgen.jobs.status import read_state
    from hpcgen.jobs.submission import next_instance

    state = read_state(arguments.run_directory)
    state.check_slurm()
    if state.complete:
        raise NothingToDo(f"the run in {state.path} is complete")
    if state.active:
        raise NothingToDo(f"job {state.active[0].id} of the run in {state.path} still waits or runs")
    if not state.submissions:
        raise NothingToDo(f"the run in {state.path} was not submitted; give the same `hpcgen run` command again")
    last = state.submissions[-1]
    instances = arguments.instances
    if last.instances:
        instances = instances or next_instance(state.path)
    elif instances is not None:
        raise NothingToDo(f"the run in {state.path} was submitted as one job: resume it without --instances")
    options = merge_options(last.slurm, _given(arguments) | {"instances": instances})
    _submit_again(options, state, first=0)
    return 0


def _add_instances(arguments: argparse.Namespace) -> int:
    from hpcgen.jobs.job_options import merge_options
    from hpcgen.jobs.status import read_state
    from hpcgen.jobs.submission import next_instance

    state = read_state(arguments.run_directory)
    if state.complete:
        raise NothingToDo(f"the run in {state.path} is complete")
    if not state.submissions:
        raise NothingToDo(
            f"the run in {state.path} was not submitted: start its command again with another --instance NAME"
        )
    last = state.submissions[-1]
    if not last.instances:
        raise NothingToDo(
            f"the run in {state.path} was submitted as one job, which has it for itself: only what was submitted with "
            "--instances can be shared"
        )
    options = merge_options(last.slurm, _given(arguments) | {"instances": arguments.count})
    _submit_again(options, state, first=next_instance(state.path))
    return 0


def _submit_again(options: "SlurmOptions", state: "RunState", first: int) -> None:
    """The last job of the run, with other options."""
    from hpcgen.jobs.preflight import check_job
    from hpcgen.jobs.submission import batch_script, submit

    path, arguments = state.path.absolute(), state.submissions[-1].arguments
    check_job(options, batch_script(options, path, arguments))
    _show(submit(options, path, arguments, first))


def _show(submission: "Submission") -> None:
    print(f"job            {submission.job_id}")
    if submission.instances:
        print(f"instances      {', '.join(submission.instances)}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
