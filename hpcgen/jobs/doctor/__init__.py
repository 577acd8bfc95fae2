"""`hpcgen doctor`: what commonly breaks on a cluster, looked for before it does, each finding with its remedy."""

import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from hpcgen.jobs.doctor.allotment import cores, memory
from hpcgen.jobs.doctor.check import Check, Level
from hpcgen.jobs.doctor.gpu import gpu, gpu_libraries
from hpcgen.jobs.doctor.machine import huge_pages, memlock, native_kernels, shared_huge_pages, shared_memory
from hpcgen.jobs.doctor.scheduler import slurm_checks
from hpcgen.jobs.doctor.storage import run_directory, weight_cache

__all__ = ["Check", "Level", "checks", "exit_code", "headline", "render"]


def checks(directory: Path, more: Iterable[Callable[[], list[Check]]] = ()) -> list[Check]:
    """All findings on this machine, for runs in `directory`. `more`: checks of other rooms.

    A check that itself fails is a finding, and hides no other.
    """
    own: list[Callable[[], list[Check]]] = [
        lambda: [cores(), memory()],
        lambda: [memlock()],
        lambda: [shared_memory()],
        lambda: [huge_pages(), shared_huge_pages()],
        lambda: [native_kernels()],
        lambda: [gpu()],
        gpu_libraries,
        lambda: run_directory(directory),
        lambda: [weight_cache()],
        slurm_checks,
    ]
    return [finding for check in [*own, *more] for finding in _carried_out(check)]


def _carried_out(check: Callable[[], list[Check]]) -> list[Check]:
    try:
        return check()
    except Exception as error:
        finding = f"a check itself failed: {type(error).__name__}: {error}"
        return [Check("doctor", Level.WARNING, finding, "tell us of it; the other findings hold")]


def render(found: Iterable[Check]) -> str:
    """A line a finding, and its remedy below."""
    lines = []
    for check in found:
        lines.append(f"{check.level.value:<8} {check.name}: {check.finding}")
        if check.remedy:
            lines.append(f"{'':<8} -> {check.remedy}")
    return "\n".join(lines)


def exit_code(found: Iterable[Check]) -> int:
    """1 where a run would fail."""
    return int(any(check.level is Level.ERROR for check in found))


def headline(directory: Path) -> str:
    """Which machine and which directory the findings are of."""
    return f"{socket.gethostname()}, runs in {directory.absolute()}"
