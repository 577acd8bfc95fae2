import pytest

from hpcgen.errors import HpcgenError
from hpcgen.scheduler import Chunk, Limits, NeverFits, Phase, Report, Scheduler, Topology


def waves(scheduler: Scheduler) -> list[list[list[Chunk]]]:
    """Chunks by wave and rank, until the scheduler stops prefilling; every chunk is reported as done."""
    found = []
    while (plan := scheduler.decide()).phase is Phase.PREFILL:
        found.append([list(part.chunks) for part in plan.ranks])
        for rank, part in enumerate(plan.ranks):
            scheduler.report(Report(rank, prefilled=part.chunks))
    return found


def test_a_sequence_larger_than_the_host_store_is_refused_with_pages_and_remedy():
    scheduler = Scheduler(Topology(), Limits(host_pages=10))
    with pytest.raises(NeverFits, match=r"sequence 3 may grow to 641 tokens, 11 KV pages.*has 10.*--host-memory"):
        scheduler.add(3, 100, 641)
    assert scheduler.done
    assert issubclass(NeverFits, HpcgenError)


def test_a_sequence_larger_than_the_device_is_refused_and_the_others_run():
    scheduler = Scheduler(Topology(), Limits(host_pages=100, device_pages=2))
    with pytest.raises(NeverFits, match="device of a rank has 2: raise --device-memory"):
        scheduler.add(0, 100, 129)
    scheduler.add(1, 100, 128)
    assert waves(scheduler) == [[[Chunk(1, 0, 100)]]]


def test_a_sequence_that_fits_exactly_is_taken():
    Scheduler(Topology(), Limits(host_pages=10, device_pages=10)).add(0, 100, 640)


def test_a_wave_takes_the_oldest_first_up_to_its_tokens():
    scheduler = Scheduler(Topology(), Limits(host_pages=100, wave_tokens=256))
    for index in range(4):
        scheduler.add(index, 100, 120)
    first, second = waves(scheduler)
    assert first == [[Chunk(0, 0, 100), Chunk(1, 0, 100), Chunk(2, 0, 56)]]
    assert second == [[Chunk(2, 56, 44), Chunk(3, 0, 100)]]


def test_a_long_prompt_spans_waves_and_its_chunks_end_with_pages():
    scheduler = Scheduler(Topology(), Limits(host_pages=100, wave_tokens=200))
    scheduler.add(0, 500, 510)
    assert waves(scheduler) == [[[Chunk(0, 0, 192)]], [[Chunk(0, 192, 192)]], [[Chunk(0, 384, 116)]]]


def test_a_wave_is_balanced_over_ranks_by_tokens():
    scheduler = Scheduler(Topology((0, 0, 1, 1)), Limits(host_pages=1000, wave_tokens=4096))
    for index in range(64):
        scheduler.add(index, 64 + index, 200)
    tokens = [sum(chunk.tokens for chunk in chunks) for chunks in waves(scheduler)[0]]
    assert max(tokens) - min(tokens) <= 128


def test_prefill_stops_at_the_watermark_and_decode_follows():
    scheduler = Scheduler(Topology(), Limits(host_pages=20, watermark=0.5))
    for index in range(30):
        scheduler.add(index, 64, 128)
    assert sum(len(chunks) for wave in waves(scheduler) for chunks in wave) == 10
    assert scheduler.waiting == 20
    assert scheduler.active > 0


def test_the_watermark_does_not_keep_out_a_sequence_from_an_empty_store():
    scheduler = Scheduler(Topology(), Limits(host_pages=10, watermark=0.1))
    scheduler.add(0, 600, 640)
    assert waves(scheduler) == [[[Chunk(0, 0, 600)]]]


def test_a_long_sequence_is_not_overtaken_by_short_ones_behind_it():
    scheduler = Scheduler(Topology(), Limits(host_pages=10, watermark=1.0))
    scheduler.add(0, 300, 310)
    scheduler.add(1, 500, 510)
    scheduler.add(2, 10, 20)
    assert waves(scheduler) == [[[Chunk(0, 0, 300)]]]
    assert scheduler.waiting == 2
