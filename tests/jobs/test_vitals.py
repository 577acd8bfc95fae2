import json

from hpcgen.jobs.vitals import Vitals


def vitals(tmp_path, *events, **options):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps({"event": kind, **fields}) + "\n" for kind, fields in events))
    return Vitals.read(path, **options)


def steps(at, phase="decode", tokens=100, seconds=10.0):
    return "steps", {"time": at, "phase": phase, "tokens": tokens, "seconds": seconds}


def test_waits_between_jobs_are_no_work(tmp_path):
    events = [("opened", {"time": 100.0}), steps(160.0), ("opened", {"time": 1000.0}), steps(1040.0)]
    assert vitals(tmp_path, *events).seconds == 100
    assert vitals(tmp_path, *events, running=True, now=1050.0).seconds == 110


def test_tokens_are_those_of_all_jobs_and_rates_those_of_the_last_steps(tmp_path):
    old = [steps(10.0 * i, tokens=50) for i in range(1, 10)]
    new = [steps(100 + 10.0 * i, tokens=200) for i in range(1, 4)]
    found = vitals(tmp_path, ("opened", {"time": 0.0}), *old, *new)
    assert found.output_tokens == 9 * 50 + 3 * 200
    assert found.rates == {"decode": 20.0}


def test_what_a_new_job_does_not_know_yet_is_not_told_of_the_last_one(tmp_path):
    load = ("load", {"time": 6.0, "active": [5], "suspended": 0, "waiting": 0, "host_pages": [10]})
    memory = ("memory", {"time": 5.0, "host_pages": 100})
    found = vitals(tmp_path, ("opened", {"time": 0.0}), memory, load, ("opened", {"time": 9.0}))
    assert (found.phase, found.active, found.kv_shares, found.rates) == ("", [], [], {})


def test_without_events_nothing_is_known(tmp_path):
    assert Vitals.read(tmp_path / "none") == Vitals()
