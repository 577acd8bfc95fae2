import pytest

from hpcgen.batch.journal import Journal, JournalError
from hpcgen.batch.merged_journal import MergedJournal
from hpcgen.batch.sub_batches import write_outputs

REQUESTS, SIZE = 7, 2


@pytest.fixture
def journals(tmp_path):
    """Two instances: a finished requests 0 to 3, b 2 to 6; requests 2 and 3 were done by both."""
    for name, requests in (("a", (3, 0, 1, 2)), ("b", (6, 2, 5, 3, 4))):
        journal = Journal(tmp_path / name, REQUESTS)
        for request in requests:
            journal.append(request, request != 5, f"{request} of {name}".encode())
        journal.close()
    return tmp_path / "a", tmp_path / "b"


def test_each_sub_batch_comes_from_the_journal_that_counts_for_it(tmp_path, journals):
    a, b = journals
    with MergedJournal(REQUESTS, SIZE, {0: a, 1: b, 2: b, 3: b}) as merged:
        merged.check_complete()
        write_outputs(merged, slice(None), tmp_path / "out", tmp_path / "errors", empty_errors=True)
    assert (tmp_path / "out").read_text().splitlines() == ["0 of a", "1 of a", "2 of b", "3 of b", "4 of b", "6 of b"]
    assert (tmp_path / "errors").read_text() == "5 of b\n"


def test_what_another_instance_writes_to_is_not_changed(journals):
    with open(journals[0], "ab") as file:
        file.write(b"\x10\x00\x00\x00half a record")
    before = journals[0].read_bytes()
    with MergedJournal(REQUESTS, SIZE, {0: journals[0]}) as merged:
        assert merged.line(1) == b"1 of a"
    assert journals[0].read_bytes() == before


def test_a_sub_batch_that_is_not_named_has_no_records(journals):
    with MergedJournal(REQUESTS, SIZE, {0: journals[0]}) as merged:
        assert [merged.finished(request) for request in range(4)] == [True, True, False, False]


def test_records_that_are_missing_are_found_before_anything_is_written(journals):
    with MergedJournal(REQUESTS, SIZE, {0: journals[1]}) as merged, pytest.raises(JournalError, match="2 requests"):
        merged.check_complete()


def test_a_record_that_was_damaged_is_not_read(journals):
    content = bytearray(journals[0].read_bytes())
    content[-5] ^= 1
    journals[0].write_bytes(content)
    with MergedJournal(REQUESTS, SIZE, {1: journals[0]}) as merged, pytest.raises(JournalError, match="damaged"):
        merged.line(2)


def test_a_journal_that_is_gone_is_one_message(tmp_path):
    with pytest.raises(JournalError, match="cannot read"):
        MergedJournal(REQUESTS, SIZE, {0: tmp_path / "absent"})
