import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgen.cluster.errors import ClusterError
from hpcgen.cluster.node_pool import hugetlb_mounts, open_node_pool, sweep
from hpcgen.cluster.world import World
from hpcgen.model.process_identity import own_identity


def test_a_pool_leaves_no_name_behind_and_begins_with_all_pages_free(tmp_path: Path) -> None:
    pool = open_node_pool(World(), 10, 5000, tmp_path)
    assert not list(tmp_path.iterdir())
    assert pool.buffer.shape == (50000,) and not pool.buffer.any() and len(pool.free) == 10
    pool.buffer[:] = 255
    assert sorted(pool.free.take(10)) == list(range(10)), "pages overlap with the list of the free ones"


def test_a_pool_that_does_not_fit_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="--host-memory"):
        open_node_pool(World(), 1 << 30, 1 << 30, tmp_path)


def test_only_pools_of_dead_processes_are_swept(tmp_path: Path) -> None:
    program = "from hpcgen.model.process_identity import own_identity; print(own_identity())"
    dead = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    left = tmp_path / f"hpcgen-store-{dead}"
    elsewhere = tmp_path / "hpcgen-store-other~1~2~3"
    for path in (left, elsewhere, tmp_path / f"hpcgen-store-{own_identity()}", tmp_path / "somebody-elses"):
        path.touch()
    assert sweep(tmp_path) == [left]
    assert not left.exists() and len(list(tmp_path.iterdir())) == 3


def test_huge_page_mounts_come_smallest_pages_first() -> None:
    mounts = ["none /a hugetlbfs rw 0 0", "tmpfs /dev/shm tmpfs rw 0 0", "none /b hugetlbfs rw 0 0"]
    sizes = {Path("/a"): 1 << 30, Path("/b"): 2 << 20}
    assert hugetlb_mounts(mounts, sizes.__getitem__) == [(Path("/b"), 2 << 20), (Path("/a"), 1 << 30)]


def test_the_memory_is_that_of_a_file_which_forked_processes_share(tmp_path: Path) -> None:
    pool = open_node_pool(World(), 2, 64, tmp_path)
    pid = os.fork()
    if pid == 0:
        pool.buffer[70] = 9
        pool.free.take(1)
        os._exit(0)
    os.waitpid(pid, 0)
    assert pool.buffer[70] == 9 and len(pool.free) == 1
