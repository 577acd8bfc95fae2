"""What Slurm says of a job, through its command-line clients; accounting is not needed.

Every call has a timeout: a busy controller must not hang a job that has seconds left.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpcgen.errors import HpcgenError

CLIENT_TIMEOUT = 20.0
"""Seconds that a client may take."""
RUNNING_STATES = ("RUNNING", "SIGNALING", "SUSPENDED", "STOPPED")
"""States in which a job has its nodes and may go on."""
ENDED_STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
)  # fmt: skip

_FIELD = re.compile(r"([A-Za-z/:]+)=(.*?)(?= [A-Za-z/:]+=|$)")


class SlurmError(HpcgenError):
    """Slurm is absent, does not answer, or refuses."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job, or one task of a job array, as the controller knows it."""

    id: str
    """`123`, or `123_4` for a task of an array."""
    state: str
    reason: str
    """Why it waits, or why it ended; 'None' where there is nothing to say."""
    nodes: str
    restarts: int
    start: str
    end: str
    """Local time of the end: of the job's limit, or, once it is being preempted, of the grace time."""

    @property
    def running(self) -> bool:
        return self.state in RUNNING_STATES

    @property
    def ended(self) -> bool:
        return self.state in ENDED_STATES


def available() -> bool:
    """Whether this machine has Slurm's clients."""
    return shutil.which("sbatch") is not None and shutil.which("scontrol") is not None


def client(*command: str, timeout: float = CLIENT_TIMEOUT) -> str:
    """Standard output of a client. Raises SlurmError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        raise SlurmError(f"There is no {command[0]} here: run this on a machine of the cluster.") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command[0]} gave no answer in {timeout:.0f} s: the Slurm controller is down or busy."
        ) from None
    if done.returncode != 0:
        raise SlurmError(f"{' '.join(command[:2])} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def parse_jobs(text: str) -> list[Job]:
    """Jobs of `scontrol show job --oneliner`."""
    return [_job(dict(_FIELD.findall(line))) for line in text.splitlines() if line.startswith("JobId=")]


def jobs(job_id: str, timeout: float = CLIENT_TIMEOUT) -> list[Job]:
    """The job, or all tasks of the array; empty once the controller has forgotten it (minutes after its end).

    Raises:
        SlurmError: Slurm does not answer.
    """
    try:
        return parse_jobs(client("scontrol", "--oneliner", "show", "job", job_id, timeout=timeout))
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return []
        raise


def cancel(job_id: str) -> None:
    """Raises SlurmError; a job that is over is none."""
    client("scancel", job_id)


def requeue(job_id: str) -> None:
    """Puts a running job, the caller's own too, back in the queue. Raises SlurmError."""
    client("scontrol", "requeue", job_id)


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """The job that this process runs in, `123_4` in an array; None outside of Slurm.

    The plain number of an array's last task is that of the whole array: a requeue by it would hit all tasks.
    """
    if "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


@dataclass(frozen=True, slots=True)
class Partition:
    """What is asked of a partition before a job is submitted to it."""

    memory: int | None
    """Bytes of the node that has most; None where Slurm does not know."""
    time_limit: str
    """As sbatch takes it, or 'infinite'."""


def partitions(names: str | None) -> list[Partition]:
    """Those of `--partition`, or the default one; none where Slurm does not answer."""
    try:
        lines = client("sinfo", "--noheader", "--format=%P %m %l").splitlines()
    except SlurmError:
        return []
    rows = [words for words in map(str.split, lines) if len(words) == 3]
    wanted = names.split(",") if names else [name.rstrip("*") for name, _, _ in rows if name.endswith("*")]
    return [Partition(_memory(size), limit) for name, size, limit in rows if name.rstrip("*") in wanted]


def _memory(text: str) -> int | None:
    # Of a node whose memory nobody stated Slurm says 1 MiB; a `+` means that others have more.
    return int(text) * 2**20 if text.isdigit() and int(text) > 1 else None


def refusal(script: str) -> str | None:
    """Why Slurm would never run a batch script; None where it would, or does not say."""
    with tempfile.NamedTemporaryFile("w", prefix="hpcgen-", suffix=".sh") as file:
        file.write(script)
        file.flush()
        try:
            client("sbatch", "--test-only", file.name)
        except SlurmError as error:
            return str(error).partition("failed: ")[2] or None
    return None


def seconds_left(own_job: str, now: float | None = None) -> float | None:
    """Seconds until Slurm begins to kill the job; None where it does not say.

    A job that is preempted has its end moved to that of its grace time. One that is being killed already has KillWait.
    """
    now = time.time() if now is None else now
    try:
        found = jobs(own_job, timeout=5.0)
        if not found:
            return None
        if found[0].running:
            return time.mktime(time.strptime(found[0].end, "%Y-%m-%dT%H:%M:%S")) - now
        match = re.search(r"KillWait\s*=\s*(\d+)", client("scontrol", "show", "config", timeout=5.0))
    except (SlurmError, ValueError):
        return None
    return float(match[1]) if match else None


def _job(fields: dict[str, str]) -> Job:
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
    return Job(
        id=f"{array}_{task}" if array and task else fields["JobId"],
        state=fields["JobState"],
        reason=fields.get("Reason", "None"),
        nodes=fields.get("NodeList", ""),
        restarts=int(fields.get("Restarts", 0)),
        start=fields.get("StartTime", ""),
        end=fields.get("EndTime", ""),
    )
