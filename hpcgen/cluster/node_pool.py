"""One pool of KV pages a node: a file in memory that the node's leader makes and its ranks map.

The file loses its name as soon as all have mapped it, so that nothing is left however the ranks end. What the moment
in between can leave is swept at the next start: only files whose maker is known to be dead, and that
this user may write.
"""

import mmap
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpcgen.cluster.errors import ClusterError
from hpcgen.cluster.shared_pages import SharedFreePages
from hpcgen.cluster.world import World
from hpcgen.model.process_identity import is_dead, own_identity

STORE_DIRECTORY = "HPCGEN_STORE_DIR"
"""Environment variable with the directory of the pool's file, in place of a hugetlbfs or /dev/shm."""
_PREFIX = "hpcgen-store-"


@dataclass(frozen=True, slots=True)
class NodePool:
    """Memory that all ranks of the node share."""

    buffer: torch.Tensor
    """uint8 [count * page_bytes]."""
    free: SharedFreePages
    kind: str
    """Which pages of memory back it, for the log."""


@dataclass(frozen=True, slots=True)
class _Place:
    directory: Path
    kind: str
    granularity: int
    advise: bool = False


def open_node_pool(world: World, count: int, page_bytes: int, directory: Path | None = None) -> NodePool:
    """The pool of this node, `count` pages of KV. Collective over the node's ranks.

    Raises ClusterError, on every rank, where the file cannot be made or has no room.
    """
    words = SharedFreePages.words_for(count)
    pages_bytes = -(-count * page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    problem, path, place, size = None, None, None, 0
    if world.is_leader:
        place = _place(pages_bytes + 4 * words, directory)
        size = -(-(pages_bytes + 4 * words) // place.granularity) * place.granularity
        path = place.directory / f"{_PREFIX}{own_identity()}"
        sweep(place.directory)
        problem = _make(path, size)
    problem, path, place, size = world.node_broadcast((problem, path, place, size))
    if problem is not None:
        raise ClusterError(problem)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED)
    if place.advise:
        memory.madvise(mmap.MADV_HUGEPAGE)
    free = SharedFreePages(np.frombuffer(memory, np.int32, words, pages_bytes), file)
    if world.is_leader:
        free.fill()
    if world.node is not None:
        world.node.Barrier()
    if world.is_leader:
        path.unlink()
    return NodePool(torch.frombuffer(memory, dtype=torch.uint8)[: count * page_bytes], free, place.kind)


def sweep(directory: Path) -> list[Path]:
    """Removes the pools in `directory` that dead processes of this user left behind on this machine; gives them."""
    left = [
        path
        for path in directory.glob(f"{_PREFIX}*")
        if is_dead(path.name.removeprefix(_PREFIX)) and os.access(path, os.W_OK)
    ]
    for path in left:
        path.unlink(missing_ok=True)  # another run may sweep too
    return left


def room_for_pool(share: float = 0.9) -> int:
    """Bytes that a pool of this node may take at most."""
    directory = Path(os.environ.get(STORE_DIRECTORY) or "/dev/shm")
    return int(shutil.disk_usage(directory).free * share) if directory.is_dir() else 0


def _place(nbytes: int, directory: Path | None) -> _Place:
    """Huge pages where they are reserved, else transparent ones, else those of 4 KiB."""
    chosen = directory or (Path(os.environ[STORE_DIRECTORY]) if os.environ.get(STORE_DIRECTORY) else None)
    if chosen is None:
        for mount, size in hugetlb_mounts(Path("/proc/mounts").read_text().splitlines(), _page_size_of):
            if os.access(mount, os.W_OK) and shutil.disk_usage(mount).free >= nbytes + size:
                return _Place(mount, f"huge pages of {size // 2**20} MiB", size)
    chosen = chosen or Path("/dev/shm")
    if hasattr(mmap, "MADV_HUGEPAGE") and _shared_memory_may_be_huge():
        return _Place(chosen, "transparent huge pages", 2**21, advise=True)
    return _Place(chosen, "pages of 4 KiB", mmap.PAGESIZE)


def hugetlb_mounts(mounts: Iterable[str], page_size: Callable[[Path], int]) -> list[tuple[Path, int]]:
    """(directory, page size) of each hugetlbfs in the lines of /proc/mounts, smallest pages first."""
    directories = [Path(fields[1]) for fields in map(str.split, mounts) if fields[2] == "hugetlbfs"]
    return sorted(((d, page_size(d)) for d in directories), key=lambda entry: entry[1])


def _page_size_of(mount: Path) -> int:
    return os.statvfs(mount).f_bsize


def _shared_memory_may_be_huge() -> bool:
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return any(f"[{choice}]" in setting for choice in ("always", "within_size", "advise", "force"))


def _make(path: Path, size: int) -> str | None:
    """Makes the file; what is wrong where it cannot be."""
    try:
        free = shutil.disk_usage(path.parent).free
        if free < size:
            return (
                f"the host store needs {size / 2**30:,.1f} GiB in {path.parent}, which has {free / 2**30:,.1f} GiB: "
                f"lower --host-memory, or name a larger directory in memory with {STORE_DIRECTORY}"
            )
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, size)
        finally:
            os.close(file)
    except OSError as error:
        return f"cannot make the host store {path}: {error.strerror}; {STORE_DIRECTORY} names another directory"
    return None
