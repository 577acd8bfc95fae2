"""From rows of a table to requests: a template with the names of columns in braces, as in `Summarise: {text}`."""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcgen.batch.request import CHAT, COMPLETIONS
from hpcgen.batch.table import Row, Table, TableError
from hpcgen.durable import write_atomically


class PromptTemplate:
    """A text with columns to be filled in; doubled braces stand for themselves.

    Raises:
        TableError: the template is malformed, or names a column that is not among `columns`.
    """

    def __init__(self, template: str, columns: list[str]) -> None:
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as error:
            raise TableError(f"the template {template!r} is malformed: {error}") from None
        self._parts = [(literal, field) for literal, field, _, _ in parts]
        if any(format_spec or conversion for _, _, format_spec, conversion in parts):
            raise TableError(f"the template {template!r} may hold only names of columns in its braces")
        for _, field in self._parts:
            if field is not None and field not in columns:
                raise TableError(f"the template names the column {field!r}; there are: {', '.join(columns) or 'none'}")

    @classmethod
    def of_column(cls, column: str, columns: list[str]) -> "PromptTemplate":
        """The template that is the cell of one column, whatever its name has in it."""
        template = cls("", columns)
        if column not in columns:
            raise TableError(f"there is no column {column!r}; there are: {', '.join(columns) or 'none'}")
        template._parts = [("", column)]
        return template

    def fill(self, row: Row) -> str | None:
        """The prompt for a row; None if a cell that it needs is missing."""
        pieces = []
        for literal, field in self._parts:
            pieces.append(literal)
            if field is not None:
                cell = row.get(field)
                if cell is None:
                    return None
                pieces.append(cell if isinstance(cell, str) else _as_text(cell))
        return "".join(pieces)


def write_requests(
    table: Table, template: PromptTemplate, destination: Path, options: Mapping[str, Any], chat: bool = True
) -> int:
    """Write one request for each row, so that row i is request i; `custom_id` is `row-i`, from 0.

    A row that makes no prompt becomes a request that is invalid for that reason: its place is in the error file.

    Args:
        table: the rows.
        template: makes the prompt: the only user message, or the prompt of a completion.
        destination: an OpenAI Batch file, replaced in one step.
        options: further fields of the bodies, such as max_tokens.
        chat: whether the requests are for chat completions.

    Returns:
        The number of rows.

    Raises:
        TableError: the table cannot be read.
        OSError: `destination` cannot be written.
    """
    count = 0
    with write_atomically(destination) as file:
        for count, row in enumerate(table.rows(), 1):
            if isinstance(row, bytes):
                file.write(row.rstrip(b"\r\n") + b"\n")
                continue
            prompt = template.fill(row)
            body = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
            request = {
                "custom_id": f"row-{count - 1}",
                "method": "POST",
                "url": CHAT if chat else COMPLETIONS,
                "body": {**body, **options},
            }
            file.write(msgspec.json.encode(request) + b"\n")
    return count


def _as_text(cell: Any) -> str:
    """Numbers, lists and the like as JSON; dates and other types of Parquet in their usual text form."""
    return msgspec.json.encode(cell, enc_hook=str).decode().strip('"')
