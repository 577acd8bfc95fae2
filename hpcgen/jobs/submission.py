"""Jobs of a run: the batch script (submitit writes and submits it), and the record of each in the run directory."""

import io
import os
import shlex
import sys
import time
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import submitit
from submitit.core.utils import FailedJobError

from hpcgen.durable import write_json
from hpcgen.jobs import slurm
from hpcgen.jobs.job_options import SlurmOptions, SubmissionError, minutes
from hpcgen.jobs.task import RunTask


@dataclass(frozen=True, slots=True)
class Submission:
    """A job of a run, as recorded in the run directory."""

    job_id: str
    """Of the array where there are several instances."""
    instances: list[str]
    """Names of the instances, in the order of the tasks; none where the job has the run directory for itself."""
    submitted: float
    """Unix time."""
    arguments: list[str]
    """Of `hpcgen`, from `run` on."""
    slurm: dict[str, Any]
    cluster_config: str | None = None
    """SLURM_CONF at the time, where it was set: which of several clusters has the job."""

    def job_of(self, instance: str) -> str:
        """Id of the job, or of the task of the array, that is this instance. ValueError if none is."""
        task = self.instances.index(instance)
        return f"{self.job_id}_{task}" if len(self.instances) > 1 else self.job_id


def batch_script(options: SlurmOptions, run_directory: Path, arguments: list[str]) -> str:
    """The script that `submit` would hand to sbatch, with the command that its ranks come to run."""
    executor = _executor(options, run_directory)
    command = shlex.join(arguments)
    if options.instances is not None:
        command += " --instance N"
        if options.instances > 1:
            executor.parameters["map_count"] = options.instances
    text = executor._make_submission_file_text(executor._submitit_command_str, "dry-run")
    return f"{text}\n\n# each rank runs: hpcgen {command}\n"


def submit(options: SlurmOptions, run_directory: Path, arguments: list[str], first: int = 0) -> Submission:
    """Submits the job, or the array of instances, and records it in the run directory.

    Args:
        arguments: of `hpcgen`, from `run` on; paths must be absolute.
        first: number of the first instance; their numbers are their names.

    Raises:
        SubmissionError: sbatch refuses; its words are in the message.
        SlurmError: there is no Slurm here.
    """
    if not slurm.available():
        raise slurm.SlurmError("There is no Slurm here (no sbatch and scontrol): submit from a machine of the cluster.")
    executor = _executor(options, run_directory)
    names = [str(first + task) for task in range(options.instances or 0)]
    tasks = [RunTask([*arguments, "--instance", name]) for name in names] or [RunTask(arguments)]
    try:
        with redirect_stderr(io.StringIO()):  # sbatch's words, which the error has too
            jobs = executor.submit_array(tasks)
    except FailedJobError as error:
        raise SubmissionError(f"sbatch refused the job: {str(error).strip()}") from None
    record = Submission(
        job_id=jobs[0].job_id.split("_")[0],
        instances=names,
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


def next_instance(run_directory: Path) -> int:
    """A number above those of all instances that a run has or had."""
    names = [path.name for path in (run_directory / "instances").glob("*")]
    names += [name for submission in submissions(run_directory) for name in submission.instances]
    return 1 + max((int(name) for name in names if name.isdigit()), default=-1)


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
    requeue = [sys.executable, "-m", "hpcgen.jobs.requeue"]
    arguments = [str(run_directory), "--max-requeues", str(options.max_requeues)]
    end = f"{shlex.join(requeue)} $? {shlex.join(arguments)} $stopped"
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
        "setup": ["trap stopped=--stopped TERM USR2", "trap : CONT", *options.setup],
        "teardown": [end, "exit $?"],
        # Else ranks would wait for one that was killed until the time limit.
        "srun_args": ["--kill-on-bad-exit=1", *options.srun],
        "stderr_to_stdout": True,
        "array_parallelism": options.instances or 1,
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
