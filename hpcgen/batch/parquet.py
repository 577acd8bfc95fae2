"""Results as a Parquet file: one row a request, in input order, joined with the columns of the input table."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec

from hpcgen.batch.journal import Records
from hpcgen.batch.table import Row, Table, TableError
from hpcgen.durable import USER_FILE_MODE, write_atomically

_BATCH_ROWS = 1024
_RESULT_COLUMNS = ("custom_id", "output", "outputs", "finish_reason", "prompt_tokens", "completion_tokens", "error")


def is_parquet(path: Path) -> bool:
    """Whether results go to `path` as Parquet.

    Raises:
        TableError: they do, and pyarrow is not installed.
    """
    if path.suffix.lower() != ".parquet":
        return False
    if find_spec("pyarrow") is None:
        raise TableError("Parquet output needs pyarrow: pip install 'hpcgen[data]'")
    return True


def write_parquet(journal: Records, table: Table | None, destination: Path) -> None:
    """Write the results of all requests; those of unfinished ones are null.

    The result's columns are custom_id, output (text of the first sample), outputs (of all), finish_reason (of the
    first), prompt_tokens, completion_tokens, error. One whose name the input uses already gets the prefix `hpcgen_`.

    Args:
        journal: of the run.
        table: the input that row by row became the requests; None: the results alone.
        destination: replaced in one step.

    Raises:
        TableError: pyarrow is not installed, or the table cannot be read.
        OSError: `destination` cannot be written.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TableError("Parquet output needs pyarrow: pip install 'hpcgen[data]'") from None
    text, count = pyarrow.string(), pyarrow.int64()
    types = (text, text, pyarrow.list_(text), text, count, count, text)
    input_fields = [] if table is None else _input_fields(table, pyarrow)
    taken = {field.name for field in input_fields}
    names = [_free_name(name, taken) for name in _RESULT_COLUMNS]
    schema = pyarrow.schema([*input_fields, *zip(names, types, strict=True)])
    with (
        write_atomically(destination, USER_FILE_MODE) as file,
        pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        batch: list[Row] = []
        for row, result in zip(_input_rows(table), _results(journal), strict=False):
            batch.append(row | dict(zip(names, result, strict=True)))
            if len(batch) == _BATCH_ROWS:
                writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))
                batch = []
        writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name = f"hpcgen_{name}"
    return name


def _input_fields(table: Table, pyarrow: Any) -> list[Any]:
    if table.kind == "parquet":
        return list(pyarrow.parquet.read_schema(table.path))
    return [pyarrow.field(name, pyarrow.string()) for name in table.columns()]


def _input_rows(table: Table | None) -> Iterator[Row]:
    """Rows for the schema. JSONL has no types that hold for a whole column: what is no string becomes JSON text."""
    if table is None:
        yield from repeat({})
        return
    for row in table.rows():
        if isinstance(row, bytes):
            yield {}
        elif table.kind == "jsonl":
            yield {
                name: cell if isinstance(cell, str | None) else msgspec.json.encode(cell).decode()
                for name, cell in row.items()
            }
        else:
            yield row


def _results(journal: Records) -> Iterator[tuple[Any, ...]]:
    """Values of _RESULT_COLUMNS for each request."""
    for request in range(len(journal.offsets)):
        if not journal.finished(request):
            yield (None,) * len(_RESULT_COLUMNS)
            continue
        line = msgspec.json.decode(journal.line(request))
        if not journal.ok[request]:
            yield (line["custom_id"], None, None, None, None, None, line["error"]["message"])
            continue
        body = line["response"]["body"]
        texts = [_text(choice) for choice in body["choices"]]
        usage = body["usage"]
        yield (
            line["custom_id"],
            texts[0],
            texts,
            body["choices"][0]["finish_reason"],
            usage["prompt_tokens"],
            usage["completion_tokens"],
            None,
        )


def _text(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]
