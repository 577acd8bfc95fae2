"""Run directories in several states, for the tests of this room."""

import json

from hpcgen.batch.journal import Journal
from hpcgen.batch.run_directory import InputIdentity, Manifest, ModelIdentity
from hpcgen.durable import write_json
from hpcgen.jobs.submission import Submission


def make_run(path, requests=10, ok=0, failed=0, complete=False, sha256="0", fingerprint="0", options=None):
    """A run of `requests` requests of which some are finished."""
    path.mkdir(parents=True, exist_ok=True)
    identity = InputIdentity(str(path / "input.jsonl"), 100, sha256, requests)
    model = ModelIdentity("/models/m", fingerprint)
    write_json(
        path / "manifest.json", Manifest(id="ab", created=1.0, input=identity, model=model, options=options or {})
    )
    journal = Journal(path / "journal", requests)
    for request in range(ok + failed):
        journal.append(request, request < ok, b"{}")
    journal.close()
    if complete:
        (path / "SUCCESS").write_text("{}")
    return path


def add_submission(path, job_id="5", submitted=1.0, arguments=("run",), instances=()):
    (path / "jobs").mkdir(parents=True, exist_ok=True)
    record = Submission(job_id, list(instances), submitted, list(arguments), {"nodes": 1})
    write_json(path / "jobs" / f"submission-{job_id}.json", record)


def add_events(path, *events):
    with open(path / "events.jsonl", "a") as file:
        for event in events:
            file.write(json.dumps({"time": 1.0, **event}) + "\n")


def job_line(job_id="5", state="RUNNING", **fields):
    """A line of `scontrol show job --oneliner`."""
    values = {"Reason": "None", "Restarts": 0, "NodeList": "n1", "EndTime": "2026-01-01T00:00:00", **fields}
    return f"JobId={job_id} JobName=x JobState={state} " + " ".join(f"{k}={v}" for k, v in values.items())
