"""Limits of this machine: locked and shared memory, huge pages, a compiler."""

import os
import resource
import shutil
from pathlib import Path

from hpcgen.jobs.doctor.check import Check, Level
from hpcgen.jobs.doctor.gpu import has_nvidia

GIB = 2**30


def memlock(limit: int | None = None, cuda: bool | None = None) -> Check:
    """Pinned host memory, for copies to a GPU and for RDMA, counts against RLIMIT_MEMLOCK."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return Check("memlock", Level.OK, "unlimited")
    level = Level.WARNING if (has_nvidia() if cuda is None else cuda) else Level.OK
    remedy = (
        "RDMA and pinned memory need it unlimited: `ulimit -l unlimited`, memlock in /etc/security/limits.conf, "
        "LimitMEMLOCK=infinity in slurmd's unit (and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf)"
    )
    return Check("memlock", level, f"{limit / 2**20:,.0f} MiB", remedy if level is Level.WARNING else "")


def shared_memory(path: Path = Path("/dev/shm")) -> Check:
    """Ranks of a node share their KV pages in it."""
    name = "shared memory"
    if not path.is_dir():
        return Check(name, Level.ERROR, f"there is no {path}", "mount a tmpfs there; ranks of a node share KV in it")
    free = shutil.disk_usage(path).free
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    finding = f"{free / GIB:,.1f} GiB free in {path}, of {memory / GIB:,.1f} GiB of memory"
    if free < 0.2 * memory:
        remedy = (
            f"KV of the ranks of a node must fit: remove leftovers in {path}, `mount -o remount,size=80% {path}`, in a "
            "container --shm-size or --ipc=host; or run with a smaller --host-memory"
        )
        return Check(name, Level.WARNING, finding, remedy)
    return Check(name, Level.OK, finding)


def huge_pages(root: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> Check:
    """Weights and KV are read at random; with pages of 2 MiB the TLB covers them."""
    name = "huge pages"
    try:
        chosen = _chosen((root / "enabled").read_text())
    except OSError:
        return Check(name, Level.SKIPPED, "this kernel has no transparent huge pages")
    if chosen == "never":
        remedy = f"as root: echo madvise > {root}/enabled; computing on the CPU is slower without"
        return Check(name, Level.WARNING, "switched off", remedy)
    return Check(name, Level.OK, f"transparent huge pages: {chosen}")


def shared_huge_pages(root: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> Check:
    """KV that the ranks of a node share lies in shared memory, which has a setting of its own."""
    name = "huge pages of shared memory"
    try:
        chosen = _chosen((root / "shmem_enabled").read_text())
    except OSError:
        return Check(name, Level.SKIPPED, "this kernel has none")
    if chosen in ("never", "deny"):
        remedy = f"as root: echo advise > {root}/shmem_enabled; it matters where several ranks share a node"
        return Check(name, Level.WARNING, "switched off", remedy)
    return Check(name, Level.OK, chosen)


def native_kernels() -> Check:
    """The C++ kernels are compiled at first use."""
    from hpcgen.kernels.native.library import native_library

    if native_library() is not None:
        return Check("CPU kernels", Level.OK, "compiled and loaded")
    remedy = "install a C++ compiler (g++ or clang++) on the machine that runs; without it torch computes, slower"
    return Check("CPU kernels", Level.WARNING, "cannot be compiled here", remedy)


def _chosen(text: str) -> str:
    """The bracketed word of 'always [madvise] never'."""
    return text.partition("[")[2].partition("]")[0]
