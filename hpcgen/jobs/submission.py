"""What `hpcgen submit` asks Slurm for, and the batch script that comes of it (submitit writes and submits it)."""

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import submitit
import yaml
from submitit.core.utils import FailedJobError

from hpcgen.durable import write_json
from hpcgen.errors import HpcgenError
from hpcgen.jobs import slurm
from hpcgen.jobs.requeue import DEFAULT_MAX_REQUEUES
from hpcgen.jobs.task import RunTask

CLUSTERS = Path(__file__).parent.parent / "configs" / "clusters"


class SubmissionError(HpcgenError):
    """The job as described cannot be submitted."""


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resources and site settings of a job; the `slurm:` section of a cluster file has the same names.

    None leaves a matter to the site's defaults.
    """

    nodes: int = 1
    gpus_per_node: int | None = None
    tasks_per_node: int | None = None
    """MPI ranks on a node; None: one for each GPU, else one."""
    cpus_per_task: int | None = None
    mem: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "1:00:00"
    """Limit of one stay in the queue, as sbatch has it; a run that needs longer is requeued."""
    constraint: str | None = None
    reservation: str | None = None
    job_name: str = "hpcgen"
    sbatch: dict[str, str | int | bool] = {}
    """Further options of sbatch without the dashes; true for those without a value."""
    srun: list[str] = []
    """Further arguments of srun, such as `--mpi=pmix` or `--cpu-bind=cores`."""
    setup: list[str] = []
    """Lines of shell before the ranks start: modules, a container, variables."""
    signal_seconds: int = 120
    """The stop signal comes this long before the time limit."""
    max_requeues: int = DEFAULT_MAX_REQUEUES
    instances: int = 1
    """Tasks of a job array over the same run directory."""

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus_per_node or 1


@dataclass(frozen=True, slots=True)
class Submission:
    """A job of a run, as recorded in the run directory."""

    job_id: str
    """Of the array where `instances` is more than 1."""
    instances: int
    submitted: float
    """Unix time."""
    arguments: list[str]
    """Of `hpcgen`, from `run` on."""
    slurm: dict[str, Any]
    cluster_config: str | None = None
    """SLURM_CONF at the time, where it was set: which of several clusters has the job."""


def load_cluster_file(name: str) -> dict[str, Any]:
    """A cluster file, given by path or by name; its section `slurm:` has options of jobs.

    Raises:
        SubmissionError: there is no such file, or it is none.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else CLUSTERS / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in CLUSTERS.glob("*.yaml")))
        raise SubmissionError(f"there is no cluster file {path}; known clusters: {known}") from None
    except (OSError, yaml.YAMLError) as error:
        raise SubmissionError(f"cannot read the cluster file {path}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("slurm", {}), dict):
        raise SubmissionError(f"{path} is no cluster file: it has names with values, and a section `slurm:`")
    return content


def merge_options(cluster: Mapping[str, Any], given: Mapping[str, Any]) -> SlurmOptions:
    """Options of the command line over those of the cluster file; lists and `sbatch` are joined.

    Raises:
        SubmissionError: a name or a value is wrong.
    """
    merged = dict(cluster)
    for name, value in given.items():
        if value is None:
            continue
        before = merged.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[name] = {**before, **value}
        elif isinstance(value, list) and isinstance(before, list):
            merged[name] = [*before, *value]
        else:
            merged[name] = value
    if isinstance(merged.get("time"), int):
        raise SubmissionError("Slurm options: write time in quotes, as in '4:00:00'; YAML reads a number without them")
    try:
        options = msgspec.convert(merged, SlurmOptions)
    except msgspec.ValidationError as error:
        raise SubmissionError(f"Slurm options: {error}") from None
    limit = minutes(options.time)
    if options.signal_seconds >= limit * 60:
        raise SubmissionError(
            f"the stop signal comes {options.signal_seconds} s before the limit, but --time {options.time} is no "
            "longer than that: raise --time, or lower --signal-seconds"
        )
    return options


def minutes(time_limit: str) -> int:
    """Minutes of a time limit as sbatch takes it: 90, 90:00, 4:00:00, 1-12, 1-12:30. Raises SubmissionError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit.strip())
    if match is None:
        raise SubmissionError(f"{time_limit!r} is no time limit: write 90 (minutes), 4:00:00 or 1-12:00:00")
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is not None:
        total = (days * 24 + first) * 60 + second + (third > 0)
    elif match[4] is not None:
        total = first * 60 + second + (third > 0)
    else:
        total = first + (second > 0)
    return max(total, 1)


def batch_script(options: SlurmOptions, run_directory: Path, arguments: list[str]) -> str:
    """The script that `submit` would hand to sbatch, with the command that its ranks come to run."""
    executor = _executor(options, run_directory)
    if options.instances > 1:
        executor.parameters["map_count"] = options.instances
    text = executor._make_submission_file_text(executor._submitit_command_str, "dry-run")
    return f"{text}\n\n# each rank runs: hpcgen {shlex.join(arguments)}\n"


def submit(options: SlurmOptions, run_directory: Path, arguments: list[str]) -> Submission:
    """Submits the job, or the array of instances, and records it in the run directory.

    Args:
        arguments: of `hpcgen`, from `run` on; paths must be absolute.

    Raises:
        SubmissionError: sbatch refuses; its words are in the message.
        SlurmError: there is no Slurm here.
    """
    if not slurm.available():
        raise slurm.SlurmError("There is no Slurm here (no sbatch and scontrol): submit from a machine of the cluster.")
    executor = _executor(options, run_directory)
    try:
        jobs = executor.submit_array([RunTask(arguments)] * options.instances)
    except FailedJobError as error:
        raise SubmissionError(f"sbatch refused the job: {str(error).strip()}") from None
    record = Submission(
        job_id=jobs[0].job_id.split("_")[0],
        instances=options.instances,
        submitted=time.time(),
        arguments=arguments,
        slurm=msgspec.to_builtins(options),
        cluster_config=os.environ.get("SLURM_CONF"),
    )
    write_json(jobs_directory(run_directory) / f"submission-{record.job_id}.json", record)
    return record


def submissions(run_directory: Path) -> list[Submission]:
    """Jobs that were submitted for a run, oldest first. Raises SubmissionError for a record that cannot be read."""
    found = [_read_submission(path) for path in jobs_directory(run_directory).glob("submission-*.json")]
    return sorted(found, key=lambda submission: submission.submitted)


def jobs_directory(run_directory: Path) -> Path:
    """Where a run keeps records, scripts and logs of its jobs."""
    return run_directory / "jobs"


def _read_submission(path: Path) -> Submission:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Submission)
    except (OSError, msgspec.DecodeError) as error:
        raise SubmissionError(f"cannot read {path}: {error}") from None


def _executor(options: SlurmOptions, run_directory: Path) -> submitit.SlurmExecutor:
    # submitit counts any stop in the last minutes of a job as a time-out and gives up after a few of them. Here the end
    # of the batch script decides what is done again, so that count must never do.
    executor = _Executor(jobs_directory(run_directory), max_num_timeout=10**6)
    requeue = [sys.executable, "-m", "hpcgen.jobs.requeue", "$status", str(run_directory)]
    requeue += ["--max-requeues", str(options.max_requeues)]
    parameters: dict[str, Any] = {
        "job_name": options.job_name,
        "nodes": options.nodes,
        "ntasks_per_node": options.ranks_per_node,
        "gpus_per_node": options.gpus_per_node,
        "cpus_per_task": options.cpus_per_task,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "time": minutes(options.time),
        "signal_delay_s": options.signal_seconds,
        # The shell outlives the stop signals, so that it can requeue the job.
        "setup": ["trap : TERM USR2 CONT", *options.setup],
        "teardown": ["status=$?", shlex.join(requeue).replace("'$status'", "$status"), "exit $status"],
        "srun_args": options.srun,
        "stderr_to_stdout": True,
        "array_parallelism": options.instances,
    }
    additional = {"requeue": True, "mem": options.mem, "reservation": options.reservation, **options.sbatch}
    executor.update_parameters(
        wckey=None,  # else submitit's own, which clusters that track workload keys refuse
        additional_parameters={name: value for name, value in additional.items() if value is not None},
        **{name: value for name, value in parameters.items() if value is not None},
    )
    return executor


class _Executor(submitit.SlurmExecutor):
    """submitit's, but scripts can be written on a machine without Slurm (--dry-run)."""

    @classmethod
    def affinity(cls) -> int:
        return 2
