import pytest

from tests.cluster.launching import needs_mpi, run_program

pytestmark = [needs_mpi, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_spread_over_ranks_give_what_one_rank_computes_with_uneven_and_no_tokens(ranks: int) -> None:
    assert "same" in run_program("dispatch", (ranks,))


def test_mpi_tells_ranks_of_a_process_group_where_they_meet() -> None:
    assert "same" in run_program("process_group", (1, 2))
