from hpcgen.scheduler import Limits, Migration, Phase, Report, Scheduler, Topology


def test_stragglers_of_one_rank_are_spread_over_the_idle_ranks_of_its_node():
    scheduler = Scheduler(Topology((0, 0)), Limits(host_pages=100, partition_below=4))
    for index in range(8):
        scheduler.add(index, 64, 1024, kv_length=64, node=0)
    first = scheduler.decide()
    assert [sorted(part.resume) for part in first.ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    scheduler.report(Report(0, steps=64))
    scheduler.report(Report(1, steps=64, finished=[1, 3, 5, 7]))
    assert scheduler.decide().ranks[0].suspend == [6]
    scheduler.report(Report(0, steps=64))
    scheduler.report(Report(1, steps=64))
    assert scheduler.decide().ranks[1].resume == [6]


def test_stragglers_migrate_to_an_idle_node_after_they_are_written_back():
    scheduler = Scheduler(Topology((0, 1)), Limits(host_pages=100, partition_below=2))
    for index in range(2):
        scheduler.add(index, 64, 1024, kv_length=64, node=0)
    assert scheduler.decide().ranks[0].resume == [0, 1]
    scheduler.report(Report(0, steps=64))
    assert scheduler.decide().ranks[0].suspend == [1]
    scheduler.report(Report(0, steps=64))
    assert scheduler.decide().migrations == [Migration(1, 0, 1, 2)]
    scheduler.report(Report(0, steps=64))
    scheduler.report(Report(1, steps=64, migrated=[1]))
    assert scheduler.decide().ranks[1].resume == [1]


def test_the_last_sequence_is_split_over_all_ranks():
    scheduler = Scheduler(Topology((0, 0, 1)), Limits(host_pages=100, partition_below=1))
    for index in range(2):
        scheduler.add(index, 64, 1024, kv_length=64, node=0)
    assert scheduler.decide().partition == ()
    scheduler.report(Report(0, steps=64))
    scheduler.report(Report(1, steps=64, finished=[1]))
    assert scheduler.decide().partition == ((0, (0, 1, 2)),)


def test_nothing_is_split_while_a_sequence_waits():
    scheduler = Scheduler(Topology((0, 0)), Limits(host_pages=100, partition_below=4))
    scheduler.add(0, 64, 1024)
    assert scheduler.decide().phase is Phase.PREFILL


def test_without_a_threshold_nothing_is_split():
    scheduler = Scheduler(Topology((0, 0)), Limits(host_pages=100))
    scheduler.add(0, 64, 1024, kv_length=64, node=0)
    assert scheduler.decide().partition == ()
