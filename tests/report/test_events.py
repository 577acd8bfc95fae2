import errno
import json
import os

from hpcgen.report.events import VERSION, EventLog, read_events


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_events_come_back_in_order_with_their_fields(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, job="17") as log:
        log.write("wave", sequences=8, tokens=512)
        log.write("checkpoint", epoch=3, bytes=10)
    opened, wave, checkpoint = read_events(path)
    assert (opened["event"], opened["version"], opened["job"]) == ("opened", VERSION, "17")
    assert (wave["event"], wave["sequences"], wave["tokens"]) == ("wave", 8, 512)
    assert (checkpoint["event"], checkpoint["epoch"]) == ("checkpoint", 3)


def test_steps_are_summed_up_and_a_phase_switch_is_an_event(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.step("prefill", tokens=100, seconds=1.0)
        for _ in range(500):
            log.step("decode", tokens=8, seconds=0.01)
    kinds = [
        (event["event"], event.get("phase"), event.get("steps"), event.get("tokens")) for event in read_events(path)
    ]
    assert kinds[1:] == [
        ("phase", "prefill", None, None),
        ("steps", "prefill", 1, 100),
        ("phase", "decode", None, None),
        ("steps", "decode", 500, 4000),
    ]


def test_a_phase_begins_with_its_first_step_and_steps_end_with_their_last(tmp_path):
    path, clock = tmp_path / "events.jsonl", Clock()
    log = EventLog(path, interval=1e9, clock=clock)
    for _ in range(3):
        clock.now += 10
        log.step("decode", tokens=1, seconds=10.0)
    clock.now += 100
    log.close()
    _, phase, steps = read_events(path)
    assert (phase["time"], steps["time"], steps["seconds"]) == (1000.0, 1030.0, 30.0)


def test_steps_before_an_event_stand_before_it(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.step("decode", tokens=8, seconds=0.01)
        log.write("checkpoint", epoch=1)
    assert [event["event"] for event in read_events(path)] == ["opened", "phase", "steps", "checkpoint"]


def test_events_reach_the_file_when_the_interval_is_over(tmp_path):
    path, clock = tmp_path / "events.jsonl", Clock()
    log = EventLog(path, interval=5, clock=clock)
    log.write("wave")
    assert len(list(read_events(path))) == 1
    clock.now += 5
    log.step("decode", tokens=1, seconds=0.1)
    assert [event["event"] for event in read_events(path)] == ["opened", "wave", "phase", "steps"]
    log.close()


def test_a_second_job_appends(tmp_path):
    path = tmp_path / "events.jsonl"
    for job in "12":
        EventLog(path, job=job).close()
    assert [event["job"] for event in read_events(path)] == ["1", "2"]


def test_half_a_line_of_a_killed_job_costs_no_event_of_the_next_one(tmp_path):
    path = tmp_path / "events.jsonl"
    EventLog(path, job="1").close()
    with open(path, "a") as file:
        file.write('{"event":"wa')
    EventLog(path, job="2").close()
    assert [event["job"] for event in read_events(path)] == ["1", "2"]


def test_a_full_disk_loses_events_but_does_not_stop_the_run(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    write = os.write

    def full(file, data):
        write(file, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.write("lost")
        log.flush()
    log.write("kept")
    log.close()
    assert [event["event"] for event in read_events(path)] == ["opened", "kept"]


def test_every_line_is_json(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("error", reason='a "quoted"\nname')
    assert all(json.loads(line) for line in path.read_text().splitlines())
