from dataclasses import replace
from pathlib import Path

import pytest

from hpcgen.report.summary import Summary, percentile, render

SUMMARY = Summary(
    requests_ok=70,
    requests_failed=0,
    prompt_tokens=12345,
    output_tokens=4000,
    bct=80.0,
    prefill_seconds=10.0,
    decode_seconds=65.5,
    peak_memory=3 * 2**29,
    output=Path("out.jsonl"),
    errors=Path("out.errors.jsonl"),
    run_directory=Path("run"),
)


def rows(summary):
    return dict(line.split("  ", 1) for line in render(summary).splitlines())


def table(summary):
    return {name.strip(): value.strip() for name, value in rows(summary).items()}


def test_the_table_has_counts_times_rates_and_places():
    values = table(SUMMARY)
    assert values["requests"] == "70 ok, 0 failed"
    assert values["prompt tokens"] == "12,345"
    assert values["batch completion time"] == "1:20 (80.0 s)"
    assert values["output tokens/s"] == "50.0"
    assert values["prefill, decode"] == "10.0 s, 65.5 s"
    assert values["peak memory"] == "1.50 GiB"
    assert values["results"] == "out.jsonl"
    assert values["run directory"] == "run"


def test_the_error_file_is_named_only_where_something_failed():
    assert "errors" not in table(SUMMARY)
    assert table(replace(SUMMARY, requests_failed=2))["errors"] == "out.errors.jsonl"


def test_sub_batches_are_shown_as_percentiles():
    values = table(replace(SUMMARY, scts=[float(i) for i in range(1, 101)]))
    assert values["sub-batches (100)"] == "p50 0:50, p90 1:30, p99 1:39"


def test_a_run_that_computed_nothing_has_no_rate():
    assert table(replace(SUMMARY, bct=0.0))["output tokens/s"] == "-"


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.0), (51, 3.0), (100, 4.0)])
def test_percentiles_are_of_the_nearest_rank(percent, value):
    assert percentile([4.0, 2.0, 1.0, 3.0], percent) == value


def test_there_is_no_percentile_of_nothing():
    with pytest.raises(ValueError):
        percentile([], 50)


def test_what_periodic_checkpoints_cost_is_said_where_there_were_any():
    assert "periodic checkpoints" not in table(SUMMARY)
    values = table(replace(SUMMARY, checkpoints=3, checkpoint_stall=0.2))
    assert values["periodic checkpoints"] == "3, waited for 0.20 s (0.25%)"
