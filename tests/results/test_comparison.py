"""The programs of results/bench: what they take, what is left to run, and the report."""

import argparse
import json
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "results" / "bench"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCH))


def result(engine: str, seconds: float, **changes) -> dict:
    return {
        "engine": engine, "model": "m", "work": "W1", "requests": 4, "seconds": seconds, "first_token": 2.0,
        "prompt_tokens": 512, "output_tokens": 512, "peak_bytes": 1e9, "others": 0.01, **changes,
    }  # fmt: skip


def test_work_has_requests_repeats_and_may_be_of_one_model():
    from compare import parse_work

    assert parse_work("W1:128x3") == ("W1", None, 128, 3)
    assert parse_work("W2@qwen3-moe:64") == ("W2", "qwen3-moe", 64, 1)
    with pytest.raises(argparse.ArgumentTypeError, match="W1:128x3"):
        parse_work("W1")


def test_repeats_are_in_turns_and_what_was_run_is_not_run_again(tmp_path):
    from compare import Sitting

    arguments = argparse.Namespace(output=tmp_path / "out", work=[("W1", None, 4, 2), ("W3", "m", 2, 1)], threads=1)
    (tmp_path / "out.jsonl").write_text(json.dumps(result("hpcgen", 1.0)) + "\n")
    sitting = Sitting(arguments, tmp_path)
    assert sitting.batches("m") == [("W1", 4), ("W3", 2), ("W1", 4)]
    assert sitting.batches("other") == [("W1", 4), ("W1", 4)]
    assert sorted(sitting.missing("hpcgen", "m")) == [("W1", 4), ("W3", 2)]
    assert len(sitting.missing("vllm", "m")) == 3


def test_the_report_has_medians_and_the_ratio_to_the_fastest_peer(tmp_path):
    from comparison_report import write_report

    results = [result("hpcgen", seconds) for seconds in (1.0, 9.0, 2.0)]
    results += [result("vllm", 6.0), result("openvino", 8.0), result("hpcgen", 3.0, work="short", requests=10)]
    write_report(results, "the command", tmp_path / "report")
    table = (tmp_path / "report.md").read_text()
    assert "| m | W1 | 4 | 2.0 | 8.0 | 6.0 | 3.00 | 256 | 3, 1, 1 |" in table
    assert "the command" in table and "| m | 10 | 3.00 | 300.00 |" in table
    assert (tmp_path / "report.svg").read_text().startswith("<?xml")


def test_engines_that_did_other_work_are_not_compared(tmp_path):
    from comparison_report import write_report

    with pytest.raises(SystemExit, match="same work"):
        write_report([result("hpcgen", 1.0), result("vllm", 1.0, output_tokens=500)], "", tmp_path / "report")
