"""What an instance of a shared run works on, with stand-ins for the loop and the engine."""

import json
import os

import pytest

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.reader import BatchInput
from hpcgen.batch.request import RequestError
from hpcgen.batch.results import Results
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.jobs.leases import Leases
from hpcgen.jobs.share import LOOK_SECONDS, MOST_REQUESTS, LeasedShare, default_sub_batch

REQUESTS, SIZE = 8, 2


class Instance:
    """One instance up to its engine: it answers requests with errors, which need no model."""

    def __init__(self, path, model, batch_input, name, ahead=1):
        self.now, self.closed = 100.0, False
        self.directory = RunDirectory(path, name).open(batch_input, model, {"sub_batch": SIZE})
        self.leases = Leases(self.directory.leases, name).open(REQUESTS, SIZE)
        self.share = LeasedShare(self.leases, self.directory, ahead, lambda: self.now)
        self.results = Results(
            self.directory, batch_input, Detokenizer.load(model), SIZE, owns=self.share.owns, claim=self.share.claim
        )
        self.share.begin(self.results)
        self.intake = []

    def add(self, requests):
        """As an Intake."""
        self.intake += requests

    def take(self):
        """The request that the engine would get next; None where there is none."""
        self.share.supply(self)
        while self.intake:
            request = self.intake.pop(0)
            if self.results.is_wanted(request):
                self.share.note_begun(request)
                return request
        return None

    def answer(self, *requests):
        for request in requests:
            self.results.fail(request, RequestError(line=request + 1, code="x", message="m", custom_id="c"))
        self.results.sync(now=True)

    def close(self):
        if not self.closed:
            self.closed = True
            self.results.close()
            self.leases.close()
            self.directory.close()

    @property
    def wait(self):
        return self.share.wait_for_work(lambda: None)


@pytest.fixture
def batch_input(tmp_path):
    body = {"prompt": [5], "max_tokens": 1}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for _ in range(REQUESTS)))
    return BatchInput(tmp_path / "in.jsonl")


@pytest.fixture
def start(tmp_path, model, batch_input):
    started = []

    def start(name, **options):
        started.append(Instance(tmp_path / "run", model, batch_input, name, **options))
        return started[-1]

    yield start
    for instance in started:
        instance.close()


def die(instance):
    """As if it had shown no life for long."""
    path = instance.directory.leases / "alive" / instance.leases.instance
    os.utime(path, (0, 0))


def test_instances_work_on_different_sub_batches_and_lease_ahead_of_need(start):
    a, b = start("a"), start("b", ahead=2)
    assert a.wait and b.wait
    assert [a.take(), b.take(), a.take(), a.take()] == [0, 2, 1, 6]
    assert (a.leases.held, b.leases.held) == ([0, 3], [1, 2])


def test_a_sub_batch_is_released_by_the_instance_that_finished_it(start):
    a = start("a")
    a.take()
    a.answer(0)
    assert a.leases.done == {}
    a.answer(1)
    assert a.leases.done == {0: "a"}
    assert sorted(path.name for path in a.directory.sub_batches.iterdir()) == ["000000.errors.jsonl", "000000.jsonl"]


def test_who_takes_over_keeps_what_the_dead_instance_had_finished(start):
    a, b = start("a", ahead=4), start("b")
    a.take()
    a.answer(1, 2, 3)
    die(a)
    assert b.wait
    assert [b.take(), b.take(), b.take()] == [0, 4, 5]
    assert b.share.inherited()[0] == (a.directory.checkpoints, range(2))
    b.answer(0)
    assert b.leases.done == {0: "b", 1: "a"}


def test_an_instance_that_was_robbed_learns_of_it_and_its_results_do_not_count(start):
    a, b = start("a", ahead=4), start("b")
    a.take()
    a.answer(0)
    die(a)
    assert b.wait
    assert b.take() == 1
    assert a.share.lost() == [range(2)]
    assert not a.results.is_wanted(1)
    a.answer(1)
    b.answer(1)
    assert b.leases.done == {0: "b"}
    a.now += LOOK_SECONDS
    assert a.share.lost() == []


def test_what_was_lost_and_comes_back_is_finished_with_what_is_there(start):
    a, b = start("a", ahead=4), start("b")
    a.take()
    a.answer(0)
    die(a)
    assert b.wait
    a.share.lost()
    a.answer(1)
    b.leases.release(0)
    a.now += 100
    assert a.take() == 2
    assert a.leases.done == {0: "a"}


def test_an_instance_that_leaves_gives_back_what_it_had_not_begun(start):
    a, b = start("a", ahead=3), start("b")
    a.take()
    a.share.leave()
    assert a.leases.held == [0]
    assert b.wait
    assert b.take() == 2


def test_an_instance_that_comes_back_has_what_it_had_begun(start):
    a = start("a")
    assert [a.take(), a.take()] == [0, 1]
    a.answer(0)
    a.close()
    again = start("a")
    assert again.wait
    assert [again.take(), again.take()] == [1, 2]


def test_results_that_a_journal_has_lost_are_made_anew(start):
    a = start("a")
    a.take()
    a.answer(0, 1)
    a.close()
    with open(a.directory.journal_path, "r+b") as journal:
        journal.truncate(os.path.getsize(a.directory.journal_path) - 1)
    again = start("a")
    assert (again.leases.done, again.take()) == ({}, 1)
    assert not (again.directory.sub_batches / "000000.jsonl").exists()


def test_it_is_over_when_all_instances_have_finished(start):
    a, b = start("a", ahead=3), start("b")
    a.take()
    b.take()
    a.answer(*range(6))
    assert not a.share.over
    b.answer(6, 7)
    assert a.share.over and b.share.over and a.share.elsewhere == 2
    assert not a.wait


def test_a_shared_run_is_divided_into_a_hundred_parts_that_are_not_too_large():
    assert [default_sub_batch(n) for n in (0, 1, 100, 101, 10_000)] == [1, 1, 1, 2, 100]
    assert default_sub_batch(10**7) == MOST_REQUESTS
