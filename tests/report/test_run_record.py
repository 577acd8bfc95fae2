import json

import numpy as np
import pytest

from hpcgen.batch.run_directory import RunDirectoryError
from hpcgen.report.clock import Clock
from hpcgen.report.run_record import RunRecord
from tests.report.runs import make_run


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return RunRecord.read(make_run(tmp_path_factory.mktemp("runs") / "a.run"))


def test_waits_between_jobs_do_not_count():
    clock = Clock(((100.0, 150.0), (1000.0, 1030.0)))
    assert [clock(moment) for moment in (90, 120, 500, 1010, 2000)] == [0, 20, 50, 60, 80]
    assert clock.seconds == 80


def test_every_finished_request_is_found_with_its_lengths(record):
    assert len(record.finished) == record.requests == 200
    assert len(record.succeeded) == 194
    assert all(one.prompt_tokens == 100 + one.request % 50 for one in record.succeeded)


def test_completion_times_are_seconds_of_work_in_order(record):
    times = record.completion_times()
    assert np.all(np.diff(times) >= 0)
    assert 60 <= times[0] < times[-1] <= record.clock.seconds


def test_a_sub_batch_is_complete_with_its_last_request(record):
    times = record.sub_batch_times()
    assert len(times) == 10
    assert times[-1] == record.completion_times()[-1]


def test_errors_are_grouped_by_code_the_most_frequent_first(record):
    assert [(code, len(found)) for code, found in record.errors] == [
        ("context_length_exceeded", 4),
        ("invalid_json", 2),
    ]


def test_phases_follow_one_another_without_overlap_and_end_with_their_job(record):
    assert [span.phase for span in record.phases] == ["prefill", "decode"] * 4
    stops = [span.stop for span in record.phases]
    assert all(span.start >= stop for span, stop in zip(record.phases[1:], stops, strict=False))
    assert stops[3] == record.clock.spans[0][1] - record.clock.spans[0][0]


def test_what_is_no_curve_is_a_mark_in_its_place(record):
    assert [mark.kind for mark in record.marks] == ["checkpoint", "preempted", "resumed", "checkpoint", "finished"]
    assert record.marks[1].details == "signal SIGUSR1"
    assert record.marks[2].details == "after 1:00:01"


def test_a_job_without_a_last_word_was_killed_and_migrations_are_counted(tmp_path):
    path = make_run(tmp_path / "e.run")
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    events = [event for event in events if event["event"] != "preempted"]
    loads = [event for event in events if event["event"] == "load"]
    for load in loads[10:]:
        load["migrated"] = 7
    (path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    marks = RunRecord.read(path).marks
    assert [mark.kind for mark in marks if mark.kind in ("killed", "resumed")] == ["killed", "resumed"]
    (migrations,) = [mark for mark in marks if mark.kind == "migrations"]
    assert migrations.details == "7 sequences" and 0 < migrations.seconds < 10


def test_tokens_and_seconds_add_up_by_phase(record):
    assert record.tokens("prefill") == 40_000 * sum(event["phase"] == "prefill" for event in record.steps)
    assert record.phase_seconds("decode") == pytest.approx(456.0)


def test_a_run_without_events_is_told_from_its_journal(tmp_path):
    record = RunRecord.read(make_run(tmp_path / "b.run", events=False))
    assert len(record.finished) == 200 and record.steps == [] and record.phases == []
    assert record.clock.seconds > 0


def test_a_journal_that_is_being_written_is_read_as_far_as_it_goes(tmp_path):
    path = make_run(tmp_path / "c.run", complete=False)
    journal = path / "journal"
    journal.write_bytes(journal.read_bytes()[:-5])
    record = RunRecord.read(path)
    assert len(record.finished) == 199 and not record.complete


def test_an_empty_run_has_a_record(tmp_path):
    record = RunRecord.read(make_run(tmp_path / "d.run", requests=0, failed=0, events=False, complete=False))
    assert record.finished == [] and record.clock.seconds == 0


def test_what_is_no_run_directory_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunRecord.read(tmp_path)
