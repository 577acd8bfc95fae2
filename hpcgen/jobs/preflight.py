"""What is checked before a job is submitted, because it would fail only after hours in the queue."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcgen.batch.fingerprint import model_fingerprint
from hpcgen.batch.lock import live_owner
from hpcgen.batch.reader import BatchInput
from hpcgen.batch.request import RequestError
from hpcgen.batch.results import check_output_path
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.errors import HpcgenError
from hpcgen.jobs import slurm
from hpcgen.jobs.job_options import SlurmOptions, minutes
from hpcgen.jobs.status import read_state
from hpcgen.jobs.submission import jobs_directory, submissions

SHOWN_ERRORS = 3
CHECKED_LINES = 100_000
"""Lines of the input that are parsed; the rest is checked when its turn comes."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)B?", re.IGNORECASE)


class PreflightError(HpcgenError):
    """The job would not get far."""


def check_model(model: Path) -> int:
    """Bytes of the model's weights. Raises HpcgenError where it is no model that can be read."""
    model_fingerprint(model)
    weights = list(model.glob("*.safetensors"))
    if not weights:
        raise PreflightError(f"{model} has no weights (*.safetensors)")
    unreadable = [path.name for path in weights if not os.access(path, os.R_OK)]
    if unreadable:
        raise PreflightError(f"cannot read {', '.join(unreadable)} in {model}")
    return sum(path.stat().st_size for path in weights)


def check_input(path: Path, say: Callable[[str], None]) -> BatchInput:
    """The input; its first errors are shown. Raises HpcgenError where nothing in it could be run."""
    batch_input = BatchInput(path)
    count = min(len(batch_input), CHECKED_LINES)
    if count == 0:
        raise PreflightError(f"the input {path} is empty")
    errors = [result for result in map(batch_input.read, range(count)) if isinstance(result, RequestError)]
    for error in errors[:SHOWN_ERRORS]:
        say(f"warning: {path}: {error.message}")
    if len(errors) > SHOWN_ERRORS:
        say(f"warning: {path}: {len(errors) - SHOWN_ERRORS:,} more lines will fail")
    if len(errors) == count:
        raise PreflightError(f"no line of {path} is a request that can be run")
    return batch_input


def check_memory(weight_bytes: int, node_memory: int | None, say: Callable[[str], None]) -> None:
    """A simple estimate: each node maps all weights, and KV needs room beside them.

    Args:
        node_memory: bytes of host memory that the job has on a node; None: unknown, nothing is checked.

    Raises:
        PreflightError: the weights do not fit.
    """
    if node_memory is None:
        return
    if weight_bytes > node_memory:
        raise PreflightError(
            f"the model's {weight_bytes / 2**30:,.1f} GiB of weights do not fit the {node_memory / 2**30:,.1f} GiB "
            "of host memory of a node: ask for more (--mem), or for other nodes"
        )
    if weight_bytes > 0.8 * node_memory:
        left = (node_memory - weight_bytes) / 2**30
        say(f"warning: the weights leave {left:,.1f} GiB of a node's host memory for KV; batches will be small")


def node_memory(options: SlurmOptions, cluster: dict[str, Any]) -> int | None:
    """Bytes of host memory that the job gets on a node: as asked for, or at most what the cluster file or Slurm says
    that a node has; None where nobody does."""
    match = _SIZE.fullmatch(options.mem) if options.mem else None
    if match and float(match[1]):  # --mem=0 means all of the node
        unit = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[match[2].upper()]
        return int(float(match[1]) * unit)
    stated = cluster.get("node", {}).get("host_memory")
    if stated:
        return int(float(stated))
    sizes = [partition.memory for partition in slurm.partitions(options.partition)]
    return None if not sizes or None in sizes else max(filter(None, sizes))


def check_job(options: SlurmOptions, script: str) -> None:
    """Whether Slurm would ever start the job: it accepts jobs that wait for ever.

    Raises:
        PreflightError: it would not, with its words.
    """
    limits = [partition.time_limit for partition in slurm.partitions(options.partition)]
    if limits and all(limit != "infinite" and minutes(options.time) > minutes(limit) for limit in limits):
        raise PreflightError(f"--time {options.time} is more than the partition allows, {', '.join(limits)}")
    words = slurm.refusal(script)
    if words is not None:
        raise PreflightError(f"Slurm would never run this job: {words}")


def check_run_directory(
    path: Path, batch_input: BatchInput, model: Path, output: Path, options: Mapping[str, Any], *, shared: bool
) -> None:
    """Whether the run directory is free, or of this very run and idle.

    Args:
        options: those that decide the results, as far as the user gives them; None: a default.
        shared: whether instances are to share it.

    Raises:
        HpcgenError: it is of another run, is complete, in use, or cannot be written.
    """
    check_output_path(output, (batch_input.path, path))
    directory = RunDirectory(path)
    if directory.manifest_path.exists():
        manifest = directory.read_manifest()
        if manifest.input.sha256 != batch_input.sha256:
            raise PreflightError(f"{path} is of another input, {manifest.input.path}: use a new --run-dir")
        if manifest.model.fingerprint != model_fingerprint(model):
            raise PreflightError(f"{path} is of another model, {manifest.model.path}: use a new --run-dir")
        if manifest.shared != shared:
            begun = "is shared by instances: give --instances" if manifest.shared else "was begun without --instances"
            raise PreflightError(f"the run in {path} {begun}, or use a new --run-dir")
        for name, value in options.items():
            before = manifest.options.get(name)
            if value != before and not (value is None and (name != "sub_batch" or shared)):
                raise PreflightError(
                    f"the run in {path} was begun with --{name.replace('_', '-')} {before}, not {value}: "
                    "give the same as before, or use a new --run-dir"
                )
    if directory.manifest_path.exists() or submissions(path):
        state = read_state(path)
        if state.complete:
            raise PreflightError(f"the run in {path} is complete: its results are in {output}, or use a new --run-dir")
        if state.active:
            jobs = ", ".join(job.id for job in state.active)
            raise PreflightError(f"jobs of the run in {path} wait or run already ({jobs}): see hpcgen status {path}")
    owner = live_owner(path) if path.is_dir() else None
    if owner is not None:
        raise PreflightError(f"process {owner.pid} on this machine works on the run in {path}: wait for it or end it")
    try:
        jobs_directory(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(f"cannot write the run directory {path}: {error.strerror}") from None
    if not os.access(jobs_directory(path), os.W_OK | os.X_OK):
        raise PreflightError(f"cannot write the run directory {path}")
