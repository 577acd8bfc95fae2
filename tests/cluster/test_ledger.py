"""Rank 0's books, with two nodes of two ranks."""

from array import array

import pytest

from hpcgen.cluster.ledger import Ledger
from hpcgen.cluster.messages import Change, Ending, Health, Outcome
from hpcgen.cluster.world import Regrouping, World
from hpcgen.scheduler.plan import Migration, Phase, Plan, RankPlan, Report
from hpcgen.sequence import SamplingParams, Sequence, Status

WORLD = World(rank=0, node_of_rank=(0, 0, 1, 1), hosts=("a", "b"))
WITHOUT_RANK_1 = Regrouping((0, 2, 3), (0, 0, 1, 1), (0, 1), ("rank 1 on a",))
WITHOUT_NODE_1 = Regrouping((0, 1), (0, 0, 1, 1), (0, None), ("rank 2 on b", "rank 3 on b"))


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(WORLD)


def active_on(ledger: Ledger, key: int, rank: int, kv_length: int = 100) -> Sequence:
    """A sequence that a rank has reported to decode, with pages 10 key, 10 key + 1."""
    sequence = Sequence(key, key, 0, array("I", range(80)), SamplingParams(max_tokens=200), array("I", range(21)))
    ledger.add(sequence, None)
    ledger.orders(plan(resume={rank: [key]}), 0.0)
    change = Change(key, Status.ACTIVE, kv_length, b"", 0, [10 * key, 10 * key + 1], [], [])
    ledger.take(rank, outcome(rank, changes=[change]))
    return sequence


def plan(migrations: list[Migration] | None = None, **parts: dict[int, list[int]]) -> Plan:
    ranks = [RankPlan(**{name: part.get(rank, []) for name, part in parts.items()}) for rank in range(4)]
    return Plan(Phase.DECODE, ranks, 16, migrations or [])


def outcome(rank: int, **what) -> Outcome:
    report = {name: what.pop(name) for name in ("migrated", "returned", "finished") if name in what}
    return Outcome(Report(rank, **report), Health(1.0, 0.0, 0, 0), **what)


def test_a_dead_ranks_sequence_goes_on_from_the_host_store_of_its_node(ledger: Ledger) -> None:
    sequence = active_on(ledger, 1, rank=1)
    ledger.after_loss(WITHOUT_RANK_1, whole=True)
    assert (sequence.status, sequence.kv_length) == (Status.SUSPENDED, 100)
    assert ledger.owned(0) == [10, 11] and ledger.owned(1) == []
    assert ledger.withdraw() == [(sequence, 0)] and not ledger.sequences


def test_of_a_dead_ranks_device_only_filled_pages_are_left(ledger: Ledger) -> None:
    dead, alive = active_on(ledger, 1, rank=1), active_on(ledger, 2, rank=2)
    ledger.after_loss(WITHOUT_RANK_1, whole=False)
    assert (dead.status, dead.kv_length) == (Status.PREFILLING, 64)
    assert (alive.status, alive.kv_length) == (Status.SUSPENDED, 100)


def test_kv_of_a_lost_node_is_computed_anew(ledger: Ledger) -> None:
    sequence = active_on(ledger, 3, rank=2)
    ledger.after_loss(WITHOUT_NODE_1, whole=True)
    assert (sequence.status, sequence.kv_length, sequence.pages) == (Status.WAITING, 0, [])
    assert len(sequence.output) == 21, "tokens are never lost"
    assert ledger.withdraw() == [(sequence, None)]


def test_kv_that_was_being_discarded_is_not_trusted(ledger: Ledger) -> None:
    sequence = active_on(ledger, 1, rank=0)
    ledger.orders(plan(discard={0: [1]}), 0.0)
    ledger.after_loss(WITHOUT_RANK_1, whole=True)
    assert (sequence.kv_length, sequence.pages) == (0, []) and ledger.owned(0) == []


@pytest.mark.parametrize("source", [0, 1])
def test_what_is_on_its_way_is_where_it_came_from_if_that_is_left(ledger: Ledger, source: int) -> None:
    sequence = active_on(ledger, 1, rank=2 * source)
    ledger.orders(plan([Migration(1, source, 1 - source, 2)], suspend={2 * source: [1]}), 0.0)
    ledger.after_loss(WITHOUT_NODE_1, whole=True)
    assert sequence.kv_length == (100 if source == 0 else 0)
    assert ledger.owned(0) == ([10, 11] if source == 0 else [])


def test_a_migrate_gives_the_sequence_other_pages_and_frees_those_at_the_source(ledger: Ledger) -> None:
    sequence = active_on(ledger, 1, rank=0)
    orders = ledger.orders(plan([Migration(1, 0, 1, 2)]), prefill_seconds=0.1)
    assert orders[0].departures[0].pages == [10, 11] and orders[2].arrivals[0].source == 0
    assert orders[2].arrivals[0].patience == pytest.approx(20.0), "10 s, and what 100 tokens take to compute anew"
    ledger.take(2, outcome(2, moved=[(1, [7, 8])], migrated=[1]))
    assert sequence.pages == [7, 8] and ledger.node_of(1) == 1
    assert ledger.orders(plan(), 0.0)[0].release == [10, 11]


def test_a_migrate_that_fails_leaves_the_sequence_and_its_pages_at_the_source(ledger: Ledger) -> None:
    sequence = active_on(ledger, 1, rank=0)
    ledger.orders(plan([Migration(1, 0, 1, 2)]), 0.0)
    ledger.take(2, outcome(2, returned=[1]))
    assert sequence.pages == [10, 11] and ledger.node_of(1) == 0
    assert ledger.orders(plan(resume={1: [1]}), 0.0)[1].take_over[0].pages == [10, 11]


def test_pages_of_a_sequence_that_nobody_waits_for_are_freed_wherever_it_is(ledger: Ledger) -> None:
    kept, moving, returning = (active_on(ledger, key, rank=0) for key in (1, 2, 3))
    ledger.after_loss(WITHOUT_RANK_1, whole=True)
    ledger.orders(plan([Migration(2, 0, 1, 2), Migration(3, 0, 1, 2)]), 0.0)
    for sequence in (kept, moving, returning):
        ledger.cancel(sequence.id)
    assert ledger.orders(plan(), 0.0)[0].release == [10, 11]
    ledger.take(2, outcome(2, moved=[(2, [5, 6])], migrated=[2], returned=[3]))
    orders = ledger.orders(plan(), 0.0)
    assert sorted(orders[0].release) == [20, 21, 30, 31] and orders[2].release == [5, 6]


def test_the_last_report_of_a_sequence_tells_how_it_ended(ledger: Ledger) -> None:
    sequence = active_on(ledger, 1, rank=3)
    last = Change(1, Status.FINISHED, 0, array("I", [9]).tobytes(), 0, [], [], [])
    ended = ledger.take(3, outcome(3, changes=[last], endings=[Ending(1, "stop", None, None)], finished=[1]))
    assert ended == [sequence] and sequence.output[-1] == 9 and sequence.finish_reason == "stop"
    assert not ledger.sequences
