import random

from hpcgen.scheduler import Limits, Migration, Report, Scheduler, Topology

from .executor import Executor


def suspended(topology: Topology, limits: Limits, nodes: list[int]) -> Scheduler:
    """A scheduler with sequence i suspended on node nodes[i], 64 tokens of KV each."""
    scheduler = Scheduler(topology, limits)
    for index, node in enumerate(nodes):
        scheduler.add(index, 64, 1024, kv_length=64, node=node)
    return scheduler


def test_refill_is_first_in_first_out():
    scheduler = suspended(Topology(), Limits(host_pages=100, max_active=3), [0] * 6)
    assert scheduler.decide().ranks[0].resume == [0, 1, 2]
    scheduler.report(Report(0, steps=64, finished=[1]))
    assert scheduler.decide().ranks[0].resume == [3]


def test_resumes_are_spread_over_the_ranks_of_a_node_by_active_sequences():
    scheduler = suspended(Topology((0, 0, 0)), Limits(host_pages=200), [0] * 30)
    assert [len(part.resume) for part in scheduler.decide().ranks] == [10, 10, 10]


def test_a_rank_with_room_is_used_where_another_of_its_node_has_none():
    scheduler = suspended(Topology((0, 0)), Limits(host_pages=100, device_pages=18), [0] * 8)
    first = scheduler.decide()
    assert [len(part.resume) for part in first.ranks] == [4, 4]
    scheduler.report(Report(0, steps=64, finished=[0, 2, 4, 6]))
    scheduler.report(Report(1, steps=64))
    scheduler.add(8, 64, 1024, kv_length=64, node=0)
    assert scheduler.decide().ranks[0].resume == [8]


def test_a_node_that_runs_dry_pulls_the_oldest_of_the_node_with_most():
    scheduler = suspended(Topology((0, 1, 2)), Limits(host_pages=100, max_active=2), [0] * 3 + [1] * 8)
    plan = scheduler.decide()
    assert plan.migrations == [Migration(5, 1, 2, 1), Migration(6, 1, 2, 1)]
    assert scheduler.host_pages_used(2) == 2
    for rank in range(3):
        scheduler.report(Report(rank, steps=64, migrated=[5, 6] if rank == 2 else []))
    assert scheduler.decide().ranks[2].resume == [5, 6]


def test_nothing_migrates_where_it_is_not_allowed():
    scheduler = suspended(Topology((0, 1)), Limits(host_pages=100, max_active=2, migrate=False), [0] * 8)
    assert scheduler.decide().migrations == []


def test_a_sequence_on_its_way_is_in_no_queue():
    scheduler = suspended(Topology((0, 1)), Limits(host_pages=100, max_active=1), [0] * 4)
    (migration,) = scheduler.decide().migrations
    scheduler.report(Report(0, steps=64, finished=[0]))
    assert migration.sequence not in scheduler.decide().ranks[0].resume
    assert scheduler.unfinished == 3


def test_a_migration_from_a_lost_node_makes_the_sequence_wait_and_frees_both_nodes():
    scheduler = suspended(Topology((0, 1)), Limits(host_pages=100, max_active=1), [0] * 2)
    (migration,) = scheduler.decide().migrations
    scheduler.report(Report(0, steps=64))
    scheduler.report(Report(1, steps=64, lost=[migration.sequence]))
    assert scheduler.waiting == 1
    assert scheduler.host_pages_used(1) == 0
    assert scheduler.host_pages_used(0) == 2


def test_a_failed_migration_leaves_the_sequence_at_its_source_which_is_not_asked_for_ever():
    scheduler = suspended(Topology((0, 1)), Limits(host_pages=100, max_active=1), [0] * 2)
    attempts = 0
    while migrations := scheduler.decide().migrations:
        attempts += 1
        scheduler.report(Report(1, returned=[migrations[0].sequence]))
        assert scheduler.waiting == 0 and scheduler.host_pages_used(1) == 0
    assert attempts == 3


def spread_of_active(migrate: bool) -> float:
    """Mean over the decode plans of a long-tailed batch, its last tenth left out, of (most - fewest active) / mean."""
    draw = random.Random(1)
    topology = Topology((0, 0, 1, 1, 2, 2, 3, 3))
    executor = Executor(topology, Limits(host_pages=3000, max_active=32, migrate=migrate))
    for index in range(600):
        executor.add(index, draw.randint(16, 256), 1024, int(draw.lognormvariate(4.6, 1.0)) + 1)
    spreads = []
    while executor.scheduler.unfinished > 60:
        executor.step()
        counts = [0] * topology.ranks
        for state in executor.sequences.values():
            if state.where == "active":
                counts[state.rank] += 1
        if sum(counts):
            spreads.append((max(counts) - min(counts)) * topology.ranks / sum(counts))
    return sum(spreads) / len(spreads)


def test_the_active_sequences_of_a_long_tailed_batch_stay_spread_evenly():
    assert spread_of_active(migrate=True) < 0.7
    assert spread_of_active(migrate=False) < 0.9
