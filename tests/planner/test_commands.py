import argparse
import json

import pytest

from hpcgen.planner.commands import add_plan_parser, add_profile_parser, add_simulate_parser, duration
from hpcgen.planner.errors import PlanError
from hpcgen.planner.timeline import Span, read_trace, spans_of_events, write_trace
from tests.caches import own_cache
from tests.planner.shapes import LLAMA


@pytest.fixture
def call(tmp_path, capsys):
    """Runs a command on a small model; returns what it printed."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for add in (add_plan_parser, add_simulate_parser, add_profile_parser):
        add(commands)

    def run(command: str, *options: str, cluster: str | None = "h100x8") -> str:
        place = ["--cluster", cluster] if cluster else []
        arguments = parser.parse_args([command, "--model", str(tmp_path), *place, *options])
        assert arguments.call(arguments) == 0
        return capsys.readouterr().out

    return run


def test_plan_says_what_limits_and_what_more_would_bring(call):
    printed = call("plan", "--sequences", "2000")
    for expected in ("completion", "B_attn", "watermark", "critical path", "with 16 ranks", "limited by"):
        assert expected in printed


def test_without_a_cluster_this_machine_is_planned_for(call, tmp_path, monkeypatch):
    monkeypatch.setenv("HPCGEN_CACHE", own_cache(tmp_path))
    printed = call("plan", "--sequences", "50", "--output-tokens", "fixed:20", cluster=None)
    assert "this machine: quick measurement" in printed and "used in place" in printed


def test_plan_for_a_limit_names_the_most_sequences(call):
    assert "sequences finish within 30 s" in call("plan", "--slo", "30s")


def test_plan_names_the_saturating_instance(call):
    assert "instances of" in call("plan", "--saturation", "--sequences", "4000")


def test_plan_takes_a_file_of_requests(call, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"body": {"prompt": "x" * 400, "max_tokens": 50}}))
    assert "1 sequences, 100 prompt and 50 output tokens" in call("plan", "--workload", str(file))


def test_simulate_compares_other_systems_and_writes_a_timeline(call, tmp_path):
    trace = tmp_path / "trace.json"
    printed = call("simulate", "--sequences", "500", "--baselines", "--timeline", str(trace))
    assert "continuous" in printed and "layer-wise offloading" in printed
    assert {span.what for span in read_trace(trace)} == {"prefill", "decode"}


def test_simulate_draws_failures_and_instances(call, tmp_path):
    printed = call("simulate", "--sequences", "400", "--instances", "2", "--failure", "1s:3")
    assert "400 finished" in printed
    with pytest.raises(PlanError, match="not a failure"):
        call("simulate", "--failure", "1s:99")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_drawn(call, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    timeline, roofline = tmp_path / f"timeline.{suffix}", tmp_path / f"roofline.{suffix}"
    call("simulate", "--sequences", "200", "--timeline", str(timeline))
    layers, scaling = tmp_path / f"layers.{suffix}", tmp_path / f"scaling.{suffix}"
    drawn = ("--roofline", str(roofline), "--layers", str(layers), "--scaling", str(scaling))
    assert "nodes needed   1" in call("plan", "--sequences", "200", *drawn)
    assert all(file.stat().st_size > 5000 for file in (timeline, roofline, layers, scaling))


def test_durations_are_read():
    assert [duration(text) for text in ("90", "90s", "1.5h", "30m")] == [90, 90, 5400, 1800]
    with pytest.raises(argparse.ArgumentTypeError, match="not a time"):
        duration("soon")


def test_a_timeline_survives_its_file(tmp_path):
    spans = [Span(0, "prefill", 0.0, 1.5, 0, 100), Span(1, "decode", 1.5, 2.25, 7, 0)]
    write_trace(spans, tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == spans


def test_events_of_a_run_become_spans_of_the_same_kind():
    events = [
        {"event": "opened", "time": 100.0},
        {"event": "steps", "time": 103.0, "phase": "prefill", "steps": 2, "tokens": 50, "seconds": 2.0},
    ]
    assert spans_of_events(events) == [Span(0, "prefill", 1.0, 3.0, 0, 50)]
