import os
import stat

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcgen.batch import Journal, JournalError

RECORDS = [(2, True, b'{"id": 1}'), (0, False, b""), (4, True, b"x" * 100)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


def write(path, records, requests=5):
    journal = Journal(path, requests)
    ends = [path.stat().st_size]
    for record in records:
        journal.append(*record)
        ends.append(path.stat().st_size)
    journal.close()
    return ends


def content(journal):
    return {
        request: (bool(journal.ok[request]), journal.line(request))
        for request in range(len(journal.offsets))
        if journal.finished(request)
    }


def test_what_was_appended_is_there_after_reopening(path):
    write(path, RECORDS)
    journal = Journal(path, 5)
    assert content(journal) == {request: (ok, line) for request, ok, line in RECORDS}
    assert journal.cut_bytes == 0
    assert (journal.times[[2, 0, 4]] > 1.7e9).all() and (journal.times[[1, 3]] == 0).all()


def test_cut_at_any_byte_it_opens_with_the_whole_records_before_and_takes_new_ones(path):
    ends = write(path, RECORDS)
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        journal = Journal(path, 5)
        whole = sum(end <= size for end in ends[1:])
        assert content(journal) == {request: (ok, line) for request, ok, line in RECORDS[:whole]}
        assert journal.cut_bytes == (size - ends[whole] if size >= ends[0] else 0)
        journal.append(3, True, b"new")
        journal.close()
        reopened = Journal(path, 5)
        assert reopened.line(3) == b"new" and len(content(reopened)) == whole + 1
        reopened.close()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), tail=st.binary(min_size=1, max_size=60))
def test_a_changed_byte_or_garbage_at_the_end_never_passes_for_a_record(path, data, tail):
    path.unlink(missing_ok=True)
    ends = write(path, RECORDS)
    good = path.read_bytes()
    place = data.draw(st.integers(ends[0], len(good) - 1))
    changed = bytearray(good)
    changed[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed + tail)
    journal = Journal(path, 5)
    whole = sum(end <= place for end in ends[1:])
    assert content(journal) == {request: (ok, line) for request, ok, line in RECORDS[:whole]}
    journal.close()


def test_a_record_damaged_after_opening_is_noticed_when_it_is_read(path):
    journal = Journal(path, 1)
    journal.append(0, True, b"hello")
    with path.open("r+b") as file:
        file.seek(-6, os.SEEK_END)
        file.write(b"\x00")
    with pytest.raises(JournalError, match="damaged at byte"):
        journal.line(0)


def test_records_are_durable_only_after_a_sync(path):
    journal = Journal(path, 3, sync_seconds=1000)
    journal.append(1, True, b"a")
    assert journal.sync() == []
    journal.append(0, False, b"b")
    assert journal.sync(now=True) == [1, 0]
    assert journal.sync(now=True) == []


def test_a_sync_is_due_when_the_interval_has_passed(path):
    journal = Journal(path, 1, sync_seconds=0)
    journal.append(0, True, b"a")
    assert journal.sync() == [0]


def test_a_request_is_finished_once(path):
    journal = Journal(path, 3)
    journal.append(1, True, b"a")
    with pytest.raises(ValueError, match="finished already"):
        journal.append(1, True, b"b")


def test_journals_of_other_inputs_and_other_files_are_refused(path):
    write(path, RECORDS)
    with pytest.raises(JournalError, match="5 requests, not of 6"):
        Journal(path, 6)
    path.write_bytes(b"something else entirely")
    with pytest.raises(JournalError, match="not a journal"):
        Journal(path, 5)
    assert path.read_bytes() == b"something else entirely"


def test_a_journal_that_cannot_be_opened_is_one_clear_error(tmp_path):
    with pytest.raises(JournalError, match="cannot open the journal"):
        Journal(tmp_path / "missing" / "journal", 1)


def test_only_its_owner_may_read_it(path):
    write(path, [])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
