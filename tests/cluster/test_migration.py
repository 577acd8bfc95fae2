import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.cluster.migration import runs
from tests.cluster.launching import needs_mpi, run_program


@needs_mpi
@pytest.mark.xdist_group("ranks")
# The second set-up takes the network between the two: shared memory is closed to it.
@pytest.mark.parametrize("environment", [{}, {"MPIR_CVAR_NOLOCAL": "1"}], ids=["shared memory", "network"])
def test_thousands_of_sequences_cross_in_both_directions_under_load_and_no_byte_is_wrong(environment) -> None:
    output = run_program("storm", (1, 1), "150", "15", **environment)
    arrived = [int(count) for count in re.findall(r": (\d+) sequences arrived", output)]
    assert len(arrived) == 2 and sum(arrived) > 2000


@needs_mpi
@pytest.mark.xdist_group("ranks")
def test_a_migrate_from_a_stopped_node_is_given_up_and_those_of_others_go_on() -> None:
    assert "nothing lost" in run_program("stopped_peer", (1, 1, 1), MPIR_CVAR_NOLOCAL="1")


@given(st.lists(st.integers(0, 30), unique=True), st.data(), st.integers(1, 5))
def test_runs_cover_every_page_once_and_are_contiguous_at_both_ends(theirs, data, longest) -> None:
    own = data.draw(st.permutations(range(len(theirs))))
    found = runs(theirs, own, longest)
    pairs = [(start + i, to + i) for start, to, count in found for i in range(count)]
    assert pairs == list(zip(theirs, own, strict=True))
    assert all(count <= longest for _, _, count in found)


def test_contiguous_pages_are_one_run() -> None:
    assert runs([4, 5, 6, 9], [0, 1, 2, 3], 10) == [(4, 0, 3), (9, 3, 1)]
