import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.cluster.errors import ClusterError
from hpcgen.cluster.world import World, cores_of_local_rank, device_of_rank, open_world
from tests.cluster.launching import needs_mpi, run


@given(st.integers(1, 64), st.integers(1, 64))
def test_ranks_share_the_cores_without_overlap_where_there_are_enough(cores: int, ranks: int) -> None:
    parts = [cores_of_local_rank(range(cores), rank, ranks) for rank in range(ranks)]
    assert all(parts)
    if ranks <= cores:
        assert [core for part in parts for core in part] == list(range(cores))


def test_a_rank_knows_its_node_its_place_there_and_the_leaders() -> None:
    world = World(rank=3, node_of_rank=(0, 1, 0, 1), hosts=("a", "b"))
    assert (world.node_index, world.local_ranks, world.local_rank, world.is_leader) == (1, (1, 3), 1, False)
    assert world.leader_of(1) == 1 and not world.leads
    assert device_of_rank(world, "cuda", 4) == "cuda:1" and device_of_rank(world, "cpu", 4) == "cpu"


def test_a_process_without_a_launcher_is_a_world_of_its_own_and_imports_no_mpi() -> None:
    program = (
        "import sys; from hpcgen.cluster.world import open_world\n"
        "with open_world({}) as world: assert world.size == 1 and world.broadcast(3) == 3\n"
        "assert 'mpi4py.MPI' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@needs_mpi
def test_a_launcher_that_mpi_does_not_see_is_refused() -> None:
    program = "from hpcgen.cluster.world import open_world\nwith open_world() as world: print('went on')"
    done = run([sys.executable, "-c", program], (1,), OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="0")
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "started 4 ranks" in done.stderr


def test_an_mpi_that_cannot_be_imported_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ClusterError, match=r"hpcgen\[mpi\]"), open_world({"PMI_SIZE": "2", "PMI_RANK": "0"}):
        pass
