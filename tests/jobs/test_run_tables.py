"""`hpcgen run` from a table to a table."""

from pathlib import Path

import pyarrow.parquet
import pytest

from tests.jobs.conftest import Run, read_lines


def arguments(model: Path, source: Path, output: Path, *more: object) -> list[object]:
    body = '{"max_tokens": 4, "temperature": 0}'
    files = ["--input", source, "--output", output, "--body", body]
    return ["run", "--model", model, *files, "--threads", 1, "--host-memory", "64MB", *more]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "in.csv"
    path.write_text("id,text,output\n007,the fox,x\n008,,y\n009," + "the dog " * 300 + ",z\n")
    return path


def test_results_stand_beside_the_columns_that_they_were_made_from(
    model: Path, table: Path, tmp_path: Path, hpcgen: Run
) -> None:
    done = hpcgen(*arguments(model, table, tmp_path / "out.parquet", "--template", "say: {text}"))
    assert done.returncode == 0, done.stderr
    rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["id"], row["output"]) for row in rows] == [("007", "x"), ("008", "y"), ("009", "z")]
    assert rows[0]["completion_tokens"] == 4 and rows[0]["hpcgen_output"] and rows[0]["error"] is None
    assert rows[2]["hpcgen_output"] is None and "no room for an answer" in rows[2]["error"]
    assert "2 ok, 1 failed" in done.stdout


def test_a_table_can_end_in_lines_and_a_finished_run_writes_them_again(
    model: Path, table: Path, tmp_path: Path, hpcgen: Run
) -> None:
    command = arguments(model, table, tmp_path / "out.jsonl", "--column", "id", "--completions")
    assert hpcgen(*command).returncode == 0
    lines = read_lines(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in lines] == ["row-0", "row-1", "row-2"]
    (tmp_path / "out.jsonl").unlink()
    assert hpcgen(*command).returncode == 0
    assert read_lines(tmp_path / "out.jsonl") == lines


def test_a_table_without_a_template_is_one_clear_line(model: Path, table: Path, tmp_path: Path, hpcgen: Run) -> None:
    done = hpcgen("run", "--model", model, "--input", table, "--output", tmp_path / "out.jsonl")
    assert done.returncode == 2
    assert done.stderr.startswith("hpcgen:") and "--template" in done.stderr and done.stderr.count("\n") == 1
