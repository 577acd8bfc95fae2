"""What a user can ask of Slurm for the jobs of a run: by options, and by the `slurm:` section of a cluster file."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from hpcgen.errors import HpcgenError
from hpcgen.jobs.requeue import DEFAULT_MAX_REQUEUES

CLUSTERS = Path(__file__).parent.parent / "configs" / "clusters"


Count = Annotated[int, msgspec.Meta(ge=1)]
_OWN = {
    "array": "--instances", "signal": "--signal-seconds", "no-requeue": "--max-requeues 0", "wrap": "--setup",
    "output": None, "error": None, "open-mode": None, "requeue": None, "parsable": None, "wait": None,
    "test-only": None,
}  # fmt: skip
"""Options of sbatch that are set here, and the option of ours that sets them; None: nobody does."""


class SubmissionError(HpcgenError):
    """The job as described cannot be submitted."""


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resources and site settings of a job; the `slurm:` section of a cluster file has the same names.

    None leaves a matter to the site's defaults.
    """

    nodes: Count = 1
    gpus_per_node: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tasks_per_node: Count | None = None
    """MPI ranks on a node; None: one for each GPU, else one."""
    cpus_per_task: Count | None = None
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
    signal_seconds: Count = 120
    """The stop signal comes this long before the time limit."""
    max_requeues: Annotated[int, msgspec.Meta(ge=0)] = DEFAULT_MAX_REQUEUES
    instances: Count | None = None
    """So many that share the run directory, as tasks of a job array; None: one job that has it for itself."""

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus_per_node or 1


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
    for name in options.sbatch:
        if name in _OWN or name.replace("-", "_") in SlurmOptions.__struct_fields__:
            ours = _OWN.get(name, f"--{name}")
            raise SubmissionError(f"--sbatch {name}: " + (f"use {ours}" if ours else "hpcgen sets this itself"))
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
