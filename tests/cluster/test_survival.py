"""Ranks that are left go on when others are killed, under Open MPI's ULFM, and lose nothing."""

import pytest

from tests.cluster.faulty_batch import Batch
from tests.cluster.launching import OpenMPI

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.usefixtures("nothing_left_in_shared_memory")]


@pytest.fixture(scope="module")
def undisturbed(open_mpi: OpenMPI, tiny_moe, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Results of one rank that nothing happens to."""
    batch = Batch(tiny_moe, tmp_path_factory.mktemp("undisturbed"))
    done = open_mpi.launch(1, batch.program("nothing", {0: 1}), **batch.environment)
    assert done.returncode == 0, done.stderr
    return batch.results()


def test_one_after_the_other_dies_and_the_last_gives_what_all_would_have_given(
    open_mpi: OpenMPI, batch: Batch, undisturbed
) -> None:
    # Rank 1 shares the node of rank 0, whose host store keeps its KV; rank 2 takes its node and all KV there along.
    program = batch.program("kill", {1: 4, 2: 8})
    done = open_mpi.run(program, (2, 1), survive=True, **batch.environment)
    assert done.returncode == 0, done.stderr
    assert "rank 1 on node0 gone: 2 ranks go on" in done.stderr
    assert "on node1 gone: 1 ranks go on" in done.stderr
    assert batch.results() == undisturbed


def test_a_node_is_lost_with_both_its_ranks_at_once(open_mpi: OpenMPI, batch: Batch, undisturbed) -> None:
    # Short of memory: sequences are suspended, discarded and on their way between the nodes when it happens.
    program = batch.program("kill", {2: 6, 3: 6}, "--host-memory", "900KB")
    done = open_mpi.run(program, (2, 2), survive=True, **batch.environment)
    assert done.returncode == 0, done.stderr
    assert " ranks go on" in done.stderr
    assert batch.results() == undisturbed


def test_without_rank_0_all_end_and_the_same_command_goes_on(open_mpi: OpenMPI, batch: Batch, undisturbed) -> None:
    lost = open_mpi.launch(3, batch.program("kill", {0: 5}), FAULT_TOLERANT="1", **batch.environment)
    assert lost.returncode != 0 and not batch.output.exists()
    assert "rank 0, which schedules, is gone" in lost.stderr and "Traceback" not in lost.stderr, lost.stderr
    done = open_mpi.launch(1, batch.program("nothing", {0: 1}), **batch.environment)
    assert done.returncode == 0, done.stderr
    assert batch.results() == undisturbed
