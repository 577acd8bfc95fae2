"""Runs that several instances share."""

import json
import shutil

import pytest

from hpcgen.report.page import render_page
from hpcgen.report.run_record import RunRecord
from tests.report.runs import START, make_run


@pytest.fixture
def shared(tmp_path):
    """Two instances side by side, the second half a minute later; one journal has all requests."""
    path = make_run(tmp_path / "a.run", ranks=2, nodes=1, jobs=1, sub_batch=20)
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    for number, name in enumerate(("left", "right")):
        own = path / "instances" / name
        own.mkdir(parents=True)
        moved = [{**event, "time": event["time"] + 30 * number} for event in events]
        (own / "events.jsonl").write_text("\n".join(map(json.dumps, moved)))
    shutil.move(path / "journal", path / "instances" / "left" / "journal")
    (path / "events.jsonl").unlink()
    return path


def test_time_in_which_both_work_counts_once(shared):
    record = RunRecord.read(shared)
    assert record.clock.spans == ((START, START + 330),)
    assert len(record.finished) == 200
    assert [(job["instance"], job["worked"]) for job in record.jobs] == [("left", 300), ("right", 300)]


def test_loads_stand_side_by_side_and_end_with_their_instance(shared):
    record = RunRecord.read(shared)
    assert {len(load["active"]) for load in record.loads} == {4}
    assert record.loads[0]["active"][2:] == [0, 0]
    last = record.loads[-1]
    assert last["active"][:2] == [0, 0] and any(last["active"][2:])
    assert last["host_pages"][0] == 0 < last["host_pages"][1]


def test_every_instance_has_a_lane_and_throughputs_add_up(shared):
    page = render_page(RunRecord.read(shared))
    assert "<span>phases of left</span><span>phases of right</span>" in page
    assert "right: sequences 64" in page and "rank 3" in page and "node 1" in page
