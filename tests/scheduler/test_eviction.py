from hpcgen.scheduler import Limits, Phase, Report, Scheduler, Topology

from .executor import Executor


def decode(scheduler: Scheduler, finished: tuple[int, ...] = ()):
    """Go to the next decode plan, with every chunk of the waves before it done; report its steps on all ranks."""
    while (plan := scheduler.decide()).phase is Phase.PREFILL:
        for rank, part in enumerate(plan.ranks):
            scheduler.report(Report(rank, prefilled=part.chunks))
    for rank in range(len(plan.ranks)):
        scheduler.report(Report(rank, steps=plan.steps, finished=[*finished]))
    return plan


def test_a_device_that_runs_out_yields_the_sequence_with_most_progress_but_not_the_oldest():
    scheduler = Scheduler(Topology(), Limits(host_pages=100, device_pages=11))
    scheduler.add(0, 64, 640, generated=65, kv_length=128, node=0)
    scheduler.add(1, 64, 640, generated=193, kv_length=256, node=0)
    scheduler.add(2, 64, 640, kv_length=64, node=0)
    assert decode(scheduler).ranks[0].resume == [0, 1]  # 3 + 5 pages, and one more of each is kept free
    assert scheduler.device_pages_used() == 8
    assert decode(scheduler).ranks[0].suspend == []
    plan = decode(scheduler)
    assert (plan.ranks[0].suspend, plan.ranks[0].resume) == ([1], [])
    assert decode(scheduler).ranks[0].resume == []


def test_what_was_yielded_is_resumed_first_when_there_is_room_again():
    scheduler = Scheduler(Topology(), Limits(host_pages=100, device_pages=8))
    scheduler.add(0, 64, 448, generated=129, kv_length=192, node=0)
    scheduler.add(1, 64, 448, generated=65, kv_length=128, node=0)
    assert decode(scheduler).ranks[0].resume == [0]
    decode(scheduler, finished=(0,))
    assert decode(scheduler).ranks[0].resume == [1]


def test_a_full_host_store_discards_the_youngest_and_never_the_oldest():
    scheduler = Scheduler(Topology(), Limits(host_pages=10, watermark=1.0))
    for index in range(5):
        scheduler.add(index, 64, 640)
    assert decode(scheduler).ranks[0].resume == [0, 1]  # 2 pages each, and three suspended ones hold a page each
    assert decode(scheduler).ranks[0].discard == []
    assert decode(scheduler).ranks[0].discard == [4]
    assert decode(scheduler).ranks[0].discard == [3, 2]
    assert scheduler.waiting == 3
    assert scheduler.active == 2


def test_a_discarded_sequence_is_prefilled_again_with_all_its_tokens():
    executor = Executor(Topology(), Limits(host_pages=6, watermark=1.0))
    executor.add(0, 64, 300, 300)
    executor.add(1, 64, 300, 300)
    executor.run(100)
    discarded = [s for plan in executor.plans for s in plan.ranks[0].discard]
    again = [c for plan in executor.plans for c in plan.ranks[0].chunks if c.sequence == 1][1:]
    assert discarded and set(discarded) == {1}
    assert again and all(chunk.tokens > 64 for chunk in again)
    assert executor.finished == [0, 1]


def test_of_several_the_most_progressed_is_yielded():
    scheduler = Scheduler(Topology(), Limits(host_pages=100, device_pages=16))
    for index, kv_length in enumerate((64, 192, 128)):
        scheduler.add(index, 64, 1024, generated=kv_length - 63, kv_length=kv_length, node=0)
    assert decode(scheduler).ranks[0].resume == [0, 1, 2]  # 2 + 4 + 3 pages
    assert decode(scheduler).ranks[0].suspend == []
    assert decode(scheduler).ranks[0].suspend == []
    assert decode(scheduler).ranks[0].suspend == [1]


def test_eviction_never_starves_a_sequence_that_fits_alone():
    executor = Executor(Topology(), Limits(host_pages=11, device_pages=10, watermark=1.0))
    executor.add(0, 600, 41, 41)
    for index in range(1, 12):
        executor.add(index, 30, 600, 600)
    executor.run(1000)
    assert sorted(executor.finished) == list(range(12))
    assert executor.finished[0] == 0
