import pytest

from hpcgen.batch import Journal
from hpcgen.batch.sub_batches import Counts, SubBatches, write_outputs


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal", 5)


@pytest.fixture
def sub_batches(journal, tmp_path):
    directory = tmp_path / "sub_batches"
    directory.mkdir()
    return SubBatches(journal, directory, 2)


def names(sub_batches):
    return sorted(path.name for path in sub_batches.path(0).parent.iterdir())


def finish(journal, sub_batches, request, ok=True):
    journal.append(request, ok, b"%d" % request)
    for durable in journal.sync(now=True):
        if durable == request and sub_batches.note(durable):
            sub_batches.release(durable // sub_batches.size)


def test_a_sub_batch_is_released_with_its_last_request_in_input_order(journal, sub_batches):
    finish(journal, sub_batches, 3)
    finish(journal, sub_batches, 1)
    assert names(sub_batches) == []
    finish(journal, sub_batches, 2)
    assert names(sub_batches) == ["000001.jsonl"]
    assert sub_batches.path(1).read_bytes() == b"2\n3\n"


def test_the_last_one_may_be_smaller(journal, sub_batches):
    finish(journal, sub_batches, 4)
    assert len(sub_batches) == 3 and sub_batches.path(2).read_bytes() == b"4\n"


def test_errors_lie_beside_only_where_there_are_some(journal, sub_batches):
    finish(journal, sub_batches, 0, ok=False)
    finish(journal, sub_batches, 1)
    finish(journal, sub_batches, 2)
    finish(journal, sub_batches, 3)
    assert names(sub_batches) == ["000000.errors.jsonl", "000000.jsonl", "000001.jsonl"]
    assert (sub_batches.path(0).parent / "000000.errors.jsonl").read_bytes() == b"0\n"
    assert sub_batches.path(0).read_bytes() == b"1\n"


def test_completion_times_are_those_of_the_last_requests(journal, sub_batches):
    finish(journal, sub_batches, 1)
    finish(journal, sub_batches, 0)
    assert sub_batches.completion_times() == [journal.times[0], None, None]


def test_after_a_resume_counts_go_on_and_what_was_not_released_is(journal, sub_batches):
    for request in (0, 2, 3):
        journal.append(request, True, b"%d" % request)
    resumed = SubBatches(journal, sub_batches.path(0).parent, 2)
    resumed.release_missing()
    assert names(resumed) == ["000001.jsonl"]
    finish(journal, resumed, 1)
    assert names(resumed) == ["000000.jsonl", "000001.jsonl"]


def test_outputs_of_an_unfinished_run_hold_what_is_finished(journal, tmp_path):
    journal.append(4, True, b"4")
    journal.append(0, True, b"0")
    journal.append(2, False, b"2")
    output, errors = tmp_path / "out", tmp_path / "err"
    assert write_outputs(journal, slice(None), output, errors, empty_errors=True) == Counts(2, 1)
    assert (output.read_bytes(), errors.read_bytes()) == (b"0\n4\n", b"2\n")


def test_an_input_without_requests_has_no_sub_batches(tmp_path):
    assert SubBatches(Journal(tmp_path / "empty", 0), tmp_path, 2).completion_times() == []
