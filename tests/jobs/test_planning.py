"""The plan of a run: made, said, kept, followed, and never in the way."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from hpcgen.batch.reader import BatchInput
from hpcgen.cluster.world import World
from hpcgen.jobs import planning
from hpcgen.jobs.instance import InstanceOptions, Prepared, prepare
from hpcgen.report.events import EventLog, read_events
from tests.caches import own_cache
from tests.cluster import launching
from tests.jobs.conftest import request, write_requests


@pytest.fixture
def options(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> InstanceOptions:
    monkeypatch.setenv("HPCGEN_CACHE", own_cache(tmp_path / "cache"))
    return InstanceOptions(model=model, host_memory=64_000_000, threads=1)


class Planning:
    """Calls the planner as `run` does."""

    def __init__(self, options: InstanceOptions, tmp_path: Path, count: int = 20):
        self.options, self.file, self.events = options, tmp_path / "plan.json", tmp_path / "events.jsonl"
        self.input = write_requests(tmp_path / "in.jsonl", [request(n) for n in range(count)])
        self.said: list[str] = []

    def __call__(self) -> Prepared:
        prepared = prepare(World(), self.options)
        with EventLog(self.events) as events:
            found = planning.plan(
                World(), self.options, prepared, BatchInput(self.input), self.file, events, self.said.append
            )
        return planning.follow_plan(prepared, found)


def test_a_plan_is_said_stored_and_followed(options: InstanceOptions, tmp_path: Path) -> None:
    planned = Planning(options, tmp_path)
    followed = planned().options
    stored = json.loads(planned.file.read_text())
    assert stored["situation"]["ranks"] == 1 and "measurement" in stored["source"]
    assert followed.expert_batch == stored["plan"]["expert_batch"] != 4096
    assert followed.most_active == stored["plan"]["decode_batch"] < followed.expert_batch
    assert len(planned.said) == 1 and "B_moe" in planned.said[0] and "at most" in planned.said[0]
    (event,) = [event for event in read_events(planned.events) if event["event"] == "plan"]
    assert event["seconds"] > 0 and event["decode_rate"] > 0


def test_a_run_that_goes_on_keeps_its_plan_unless_it_is_another_situation(
    options: InstanceOptions, tmp_path: Path
) -> None:
    planned = Planning(options, tmp_path)
    planned()
    content = json.loads(planned.file.read_text())
    content["plan"]["expert_batch"] = 777
    planned.file.write_text(json.dumps(content))
    assert planned().options.expert_batch == 777
    assert "as before" in planned.said[-1]
    planned.options = InstanceOptions(**{**asdict(options), "device_memory": 50_000_000})
    assert planned().options.expert_batch != 777


def test_options_of_the_user_override_the_plan(options: InstanceOptions, tmp_path: Path) -> None:
    given = InstanceOptions(**{**asdict(options), "attention_microbatch": 33, "expert_batch": 66})
    followed = Planning(given, tmp_path)().options
    assert (followed.prefill_tokens, followed.expert_batch) == (33, 66)
    assert (followed.decode_sequences, followed.most_active) == (33, 66)


def test_a_run_without_a_plan_takes_the_defaults_and_says_why(
    options: InstanceOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no such roofline")

    monkeypatch.setattr(planning, "plan_run", broken)
    planned = Planning(options, tmp_path)
    followed = planned().options
    assert (followed.attention_microbatch, followed.expert_batch, followed.decode_batch) == (1024, 4096, None)
    assert planned.said == ["note: no plan for this run (no such roofline); it takes default batch sizes"]
    assert not planned.file.exists()


def test_lengths_of_some_requests_stand_for_all(options: InstanceOptions, tmp_path: Path) -> None:
    engine_options = prepare(World(), options).options
    lines = [request(n, max_tokens=10 + n % 2) for n in range(5000)]
    lines[::100] = ["{broken"] * 50
    workload = planning._workload(BatchInput(write_requests(tmp_path / "in.jsonl", lines)), engine_options)
    assert workload is not None and len(workload) == pytest.approx(4950, rel=0.02)
    assert set(workload.outputs.tolist()) == {10, 11}


@launching.needs_mpi
def test_ranks_measure_together_and_follow_one_plan_of_that(model: Path, tmp_path: Path) -> None:
    def hpcgen(*arguments: object) -> CompletedProcess[str]:
        command = [sys.executable, "-m", "hpcgen.cli", *map(str, arguments)]
        done = launching.run(command, (1, 1), HPCGEN_CACHE=own_cache(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        return done

    measured = hpcgen("profile", "--model", model, "--threads", 1).stdout
    assert "2 ranks on 2 nodes" in measured and "error: median" in measured
    (file,) = (tmp_path / "cache" / "profiles").iterdir()
    assert json.loads(file.read_text())["links"]["window"]["points"] >= 3

    write_requests(tmp_path / "in.jsonl", [request(n) for n in range(30)])
    files = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    said = hpcgen("run", "--model", model, *files, "--host-memory", "64MB", "--threads", 1).stderr
    assert said.count("plan: ") == 1 and "profile of 20" in said
    stored = json.loads((tmp_path / "out.run" / "plan.json").read_text())
    assert (stored["situation"]["ranks"], stored["situation"]["nodes"]) == (2, 2)
