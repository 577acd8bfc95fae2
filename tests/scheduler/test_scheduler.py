from hpcgen.scheduler import Chunk, Chunks, Limits, Phase, Report, Scheduler, Topology

from .executor import Executor


def test_an_empty_scheduler_is_done():
    scheduler = Scheduler(Topology(), Limits(host_pages=1))
    assert scheduler.done
    assert scheduler.decide().phase is Phase.DONE


def test_a_sequence_of_one_token_ends_with_its_prefill():
    scheduler = Scheduler(Topology(), Limits(host_pages=4))
    scheduler.add(0, 10, 10)
    assert scheduler.decide().ranks[0].chunks == Chunks([Chunk(0, 0, 10)])
    scheduler.report(Report(0, prefilled=Chunks([Chunk(0, 0, 10)]), finished=[0]))
    assert scheduler.done
    assert scheduler.finished == 1
    assert scheduler.host_pages_used() == 0


def test_the_life_of_a_sequence_in_counts():
    scheduler = Scheduler(Topology(), Limits(host_pages=10))
    scheduler.add(0, 100, 300)
    assert (scheduler.waiting, scheduler.prefilling, scheduler.suspended, scheduler.active) == (1, 0, 0, 0)
    plan = scheduler.decide()
    assert (scheduler.waiting, scheduler.prefilling, scheduler.suspended, scheduler.active) == (0, 1, 0, 0)
    scheduler.report(Report(0, prefilled=plan.ranks[0].chunks))
    assert (scheduler.waiting, scheduler.prefilling, scheduler.suspended, scheduler.active) == (0, 0, 1, 0)
    scheduler.decide()
    assert (scheduler.waiting, scheduler.prefilling, scheduler.suspended, scheduler.active) == (0, 0, 0, 1)
    scheduler.report(Report(0, steps=64, finished=[0]))
    assert (scheduler.unfinished, scheduler.finished) == (0, 1)


def test_a_decision_takes_no_more_steps_than_some_sequence_can():
    scheduler = Scheduler(Topology(), Limits(host_pages=10))
    scheduler.add(0, 10, 15, kv_length=10, node=0)
    scheduler.add(1, 10, 17, kv_length=10, node=0)
    assert scheduler.decide().steps == 7


def test_the_device_is_empty_in_a_prefill_phase():
    executor = Executor(Topology((0, 0)), Limits(host_pages=40, device_pages=20, max_active=4, watermark=0.5))
    for index in range(40):
        executor.add(index, 70, 100, 30 + index)
    executor.run(300)
    switches = [(a, b) for a, b in zip(executor.phases, executor.phases[1:], strict=False) if a != b]
    assert len(switches) > 4


def test_decode_gives_way_to_prefill_only_below_the_refill_share():
    limits = Limits(host_pages=1000, max_active=16, refill_below=0.5, watermark=0.064, decision_steps=8)
    executor = Executor(Topology(), limits)
    for index in range(128):
        executor.add(index, 64, 200, 1 + 37 * index % 199)
    while not executor.scheduler.done:
        active = executor.scheduler.active
        plan = executor.step()
        if plan.phase is Phase.PREFILL and executor.phases[-2:-1] == [Phase.DECODE]:
            assert active < 8


def test_a_restored_sequence_with_kv_is_not_prefilled_again():
    scheduler = Scheduler(Topology(), Limits(host_pages=10))
    scheduler.add(0, 100, 300, generated=20, kv_length=119, node=0)
    assert scheduler.decide().ranks[0].resume == [0]


def test_a_restored_sequence_without_kv_prefills_its_generated_tokens_too():
    scheduler = Scheduler(Topology(), Limits(host_pages=10))
    scheduler.add(0, 100, 300, generated=20)
    assert scheduler.decide().ranks[0].chunks == Chunks([Chunk(0, 0, 119)])


def test_a_restored_sequence_with_part_of_its_kv_prefills_the_rest():
    scheduler = Scheduler(Topology((0, 1)), Limits(host_pages=10))
    scheduler.add(0, 100, 300, generated=20, kv_length=64, node=1)
    assert scheduler.decide().ranks[1].chunks == Chunks([Chunk(0, 64, 55)])


def test_sequences_of_a_dead_rank_go_on_from_their_filled_pages_on_its_node():
    scheduler = Scheduler(Topology((0, 0)), Limits(host_pages=50, device_pages=20))
    for index in range(2):
        scheduler.add(index, 100, 300, kv_length=100, node=0)
    assert scheduler.decide().ranks[1].resume == [1]
    scheduler.report(Report(0, steps=64))
    scheduler.lose_rank(1)
    plan = scheduler.decide()
    while plan.phase is Phase.DECODE:
        scheduler.report(Report(0, steps=plan.steps, finished=[0] if plan.steps < 64 else []))
        plan = scheduler.decide()
    assert plan.ranks[0].chunks == Chunks([Chunk(1, 64, 36)])
    assert not plan.ranks[1].chunks


def test_sequences_of_a_lost_node_wait_and_are_prefilled_elsewhere():
    scheduler = Scheduler(Topology((0, 1)), Limits(host_pages=50))
    scheduler.add(0, 100, 300, kv_length=100, node=1)
    scheduler.decide()
    scheduler.lose_rank(1)
    assert scheduler.waiting == 1
    assert scheduler.host_pages_used(1) == 0
    assert scheduler.decide().ranks[0].chunks == Chunks([Chunk(0, 0, 100)])
