"""What a process may use of its machine: cores and memory, as its job and its container allot them."""

import os
from collections.abc import Mapping
from pathlib import Path

import psutil

from hpcgen.jobs.doctor.check import Check, Level

GIB = 2**30


def cores(allowed: int | None = None, present: int | None = None, environment: Mapping[str, str] = os.environ) -> Check:
    """The cores of this process against those of the machine, and what OpenMP is told."""
    allowed = len(os.sched_getaffinity(0)) if allowed is None else allowed
    present = psutil.cpu_count() or 1 if present is None else present
    finding = f"{allowed} of {present} usable"
    told = environment.get("OMP_NUM_THREADS", "")
    if told.isdigit() and int(told) > allowed:
        remedy = f"threads will wait for each other: unset OMP_NUM_THREADS, or set it to {allowed} or less"
        return Check("cores", Level.WARNING, f"{finding}, OMP_NUM_THREADS is {told}", remedy)
    if allowed == 1 and present > 1:
        remedy = (
            "one core computes, reads and tokenizes: ask for more (hpcgen submit --cpus-per-task N, srun "
            "--cpus-per-task=N: srun does not inherit sbatch's), mpirun --bind-to none, or launch/bind.sh"
        )
        return Check("cores", Level.WARNING, finding, remedy)
    return Check("cores", Level.OK, finding)


def memory(limit: int | None = None, present: int | None = None) -> Check:
    """The limit of the control group, that Slurm and containers set, against the machine's memory. In bytes."""
    present = psutil.virtual_memory().total if present is None else present
    limit = _limit() if limit is None else limit
    if limit is None or limit >= present:
        return Check("memory", Level.OK, f"{present / GIB:,.1f} GiB, no limit below that")
    finding = f"{limit / GIB:,.1f} GiB of {present / GIB:,.1f} GiB may be used here"
    if limit < 0.5 * present:
        remedy = (
            "weights and KV live in host memory, and the job is killed beyond the limit: hpcgen submit --mem 0 takes "
            "all of a node; or run with a --host-memory that fits"
        )
        return Check("memory", Level.WARNING, finding, remedy)
    return Check("memory", Level.OK, finding)


def _limit(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The lowest limit of this process's control group and those above it; None where there is none."""
    found = []
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for directory in (group, *group.parents):
            limit = directory / name
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                found.append(int(text))
            if directory == base:
                break
    return min(found, default=None)
