"""A real run, what its events say, and the page about it."""

import json
from pathlib import Path

from hpcgen.report.events import read_events
from tests.jobs.conftest import Run, read_lines, request, write_requests


def test_a_run_leaves_all_that_its_report_is_drawn_from(model: Path, tmp_path: Path, hpcgen: Run) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["fox", "dog"]}}, "required": ["a"]}
    structured = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "temperature": 1.0,
        "ignore_eos": False,
    }
    wrong = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
        "ignore_eos": False,
    }
    requests = [request(n, max_tokens=100, **(structured if n % 2 else {})) for n in range(8)] + [request(8, **wrong)]
    write_requests(tmp_path / "in.jsonl", requests)
    files = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    limits = ["--threads", 1, "--host-memory", "64MB", "--sub-batch", 3]
    done = hpcgen("run", "--model", model, *files, *limits)
    assert done.returncode == 0, done.stderr

    for line in read_lines(tmp_path / "out.jsonl")[1::2]:
        choice = line["response"]["body"]["choices"][0]
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["a"] in ("fox", "dog")
        else:
            assert choice["finish_reason"] == "length"
    (error,) = read_lines(tmp_path / "out.errors.jsonl")
    assert error["error"]["code"] == "invalid_grammar" and error["error"]["line"] == 9

    events = list(read_events(tmp_path / "out.run" / "events.jsonl"))
    kinds = {event["event"] for event in events}
    assert {"opened", "memory", "phase", "steps", "load", "finished"} <= kinds
    first, last = events[0]["time"], events[-1]["time"]
    assert 0 < sum(event["seconds"] for event in events if event["event"] == "steps") <= last - first + 0.01
    loads = [event for event in events if event["event"] == "load"]
    assert all(len(load["active"]) == len(load["host_pages"]) == 1 for load in loads)

    done = hpcgen("report", tmp_path / "out.run")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out.run" / "report.html").read_text()
    assert "invalid_grammar" in page and "Sequences" in page and "3 sub-batches" in page
