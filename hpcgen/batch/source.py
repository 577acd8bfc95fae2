"""What `--input` names, as a file of requests: as it is, decompressed, or made from the rows of a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hpcgen.batch.table import Table, TableError, decompress
from hpcgen.batch.template import PromptTemplate, write_requests
from hpcgen.durable import DIRECTORY_MODE

_COMPRESSED = (".gz", ".zst")
_TABLES = (".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How rows become requests; without `template` and `column` the input has requests already."""

    template: str | None = None
    """Text with the names of columns in braces."""
    column: str | None = None
    """The column whose cells are the prompts."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request's body."""
    completions: bool = False
    """Whether prompts are completed as they are, without the chat template."""

    @property
    def given(self) -> bool:
        return self.template is not None or self.column is not None


@dataclass(frozen=True, slots=True)
class Source:
    requests: Path
    """An OpenAI Batch file."""
    table: Table | None = None
    """The table that row by row became the requests."""


def parse_body(text: str | None) -> dict[str, Any]:
    """Fields of a body from JSON. Raises TableError where it is no object, or has what a template makes."""
    if text is None:
        return {}
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise TableError(f"--body {text!r} is not a JSON object: {error}") from None
    made = {"messages", "prompt"} & fields.keys()
    if made:
        raise TableError(f"--body may not set {made.pop()!r}: the template makes it")
    return fields


def open_source(path: Path, directory: Path, options: TemplateOptions) -> Source:
    """The requests that `path` stands for; where they must be made, in `directory`/requests.jsonl.

    Raises:
        TableError: it is a table without a template, cannot be read, or does not fit its template.
    """
    suffix = path.suffix.lower()
    if not options.given:
        if options.body or options.completions:
            raise TableError(
                "--body and --completions go with --template or --column: other inputs have requests already"
            )
        plain = path.with_suffix("") if suffix in _COMPRESSED else path
        if plain.suffix.lower() in _TABLES:
            raise TableError(
                f"{path} is a table: say what the prompts are, --template 'Summarise: {{text}}' or --column"
            )
        if suffix not in _COMPRESSED:
            return Source(path)
    if options.template is not None and options.column is not None:
        raise TableError("--template and --column exclude each other")
    requests = directory / "requests.jsonl"
    try:
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        if not options.given:
            decompress(path, requests)
            return Source(requests)
        table = Table(path)
        columns = table.columns()
        if options.column is not None:
            template = PromptTemplate.of_column(options.column, columns)
        else:
            template = PromptTemplate(options.template or "", columns)
        write_requests(table, template, requests, options.body, chat=not options.completions)
    except OSError as error:
        raise TableError(f"cannot write the requests to {requests}: {error.strerror}") from None
    return Source(requests, table)
