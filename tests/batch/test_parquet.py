import pyarrow
import pyarrow.parquet
import pytest

from hpcgen.batch import Journal
from hpcgen.batch.parquet import write_parquet
from hpcgen.batch.table import Table

OK = (
    b'{"custom_id": "row-0", "response": {"body": {"choices": [{"text": "x", "finish_reason": "stop"}, '
    b'{"text": "y", "finish_reason": "length"}], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}}}'
)
CHAT = (
    b'{"custom_id": "row-2", "response": {"body": {"choices": [{"message": {"content": "z"}, '
    b'"finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}}}'
)
FAILED = b'{"custom_id": "row-1", "error": {"message": "line 2: bad"}}'


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal", 4)
    journal.append(2, True, CHAT)
    journal.append(0, True, OK)
    journal.append(1, False, FAILED)
    return journal


def test_results_are_in_input_order_with_errors_and_gaps_in_their_places(journal, tmp_path):
    write_parquet(journal, None, tmp_path / "out.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["output"] for row in rows] == ["x", None, "z", None]
    assert [row["error"] for row in rows] == [None, "line 2: bad", None, None]
    assert rows[0]["outputs"] == ["x", "y"] and rows[0]["finish_reason"] == "stop"
    assert (rows[2]["prompt_tokens"], rows[2]["completion_tokens"]) == (1, 2)


def test_columns_of_the_input_come_first_with_their_types(journal, tmp_path):
    rows = [{"n": i, "output": f"mine {i}"} for i in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    write_parquet(journal, Table(tmp_path / "in.parquet"), tmp_path / "out.parquet")
    result = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert result.column_names[:3] == ["n", "output", "custom_id"]
    assert result.schema.field("n").type == pyarrow.int64()
    assert result["output"].to_pylist() == [row["output"] for row in rows]
    assert result["hpcgen_output"].to_pylist() == ["x", None, "z", None]


def test_cells_of_jsonl_that_are_no_strings_become_json(journal, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"a": "s"}\nbroken\n{"a": [1, 2]}\n{"b": null}\n')
    write_parquet(journal, Table(tmp_path / "in.jsonl"), tmp_path / "out.parquet")
    result = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert result["a"].to_pylist() == ["s", None, "[1,2]", None]
    assert result["custom_id"].to_pylist() == ["row-0", "row-1", "row-2", None]


def test_no_name_occurs_twice_whatever_the_input_calls_its_columns(journal, tmp_path):
    rows = [{"output": "a", "hpcgen_output": "b"}] * 4
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    write_parquet(journal, Table(tmp_path / "in.parquet"), tmp_path / "out.parquet")
    names = pyarrow.parquet.read_table(tmp_path / "out.parquet").column_names
    assert len(names) == len(set(names)) and "hpcgen_hpcgen_output" in names
