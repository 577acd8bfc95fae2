from hpcgen.cluster.health import LITTLE_MEMORY, WINDOW, HealthRecord
from hpcgen.cluster.messages import Health
from hpcgen.cluster.world import World

PLENTY = 100 * LITTLE_MEMORY


def record() -> HealthRecord:
    return HealthRecord(World(rank=0, node_of_rank=(0, 0, 1), hosts=("a", "b")))


def test_a_rank_that_the_others_wait_for_is_named_once() -> None:
    health = record()
    for _ in range(2):
        for rank, waited in enumerate((50.0, 55.0, 0.5)):
            health.add(rank, Health(WINDOW + 1, waited, 0, PLENTY))
        found = health.troubles()
        assert found == ([] if _ else ["rank 2 on b is slow: the others wait for it most of the time"])


def test_ranks_that_all_wait_a_little_are_no_trouble() -> None:
    health = record()
    for rank in range(3):
        health.add(rank, Health(WINDOW + 1, 10.0, 0, PLENTY))
    assert health.troubles() == []


def test_a_node_that_is_short_of_memory_is_named_once() -> None:
    health = record()
    for rank in (1, 2):
        health.add(rank, Health(1.0, 0.0, 0, LITTLE_MEMORY - 1))
    assert [trouble.split(" has ")[0] for trouble in health.troubles()] == ["a", "b"]
    assert health.troubles() == []


def test_ranks_that_have_reported_are_shown_with_the_share_in_which_they_waited() -> None:
    health = record()
    health.add(2, Health(2.0, 1.0, 7, PLENTY))
    (rank,) = health.ranks()
    assert (rank.rank, rank.waiting, rank.resident, rank.available) == (2, 0.5, 7, PLENTY)
