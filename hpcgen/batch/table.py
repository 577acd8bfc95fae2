"""Tables as input: the rows of a CSV, Parquet or plain JSONL file, compressed or not, as a stream."""

import codecs
import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from hpcgen.batch.reader import MAX_LINE_BYTES
from hpcgen.durable import write_atomically
from hpcgen.errors import HpcgenError

_KINDS = {".csv": "csv", ".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_COMPRESSIONS = {".gz", ".zst"}
_COPY_BYTES = 2**20

Row = dict[str, Any]


class TableError(HpcgenError):
    """A table cannot be read, or does not fit its template."""


class Table:
    """A file of rows; what it is, is told by its name: x.csv, x.parquet, x.jsonl, each also with .gz or .zst.

    Cells of a CSV are strings: a leading zero stays. Those of JSONL and Parquet have their types.

    Raises:
        TableError: the name has no suffix that is known, or the file is compressed Parquet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        if suffixes and suffixes[-1] in _COMPRESSIONS:
            suffixes.pop()
        if not suffixes or suffixes[-1] not in _KINDS:
            raise TableError(
                f"cannot tell what {path} is: its name must end in {', '.join(_KINDS)}, or that with .gz, .zst"
            )
        self.kind = _KINDS[suffixes[-1]]
        if self.kind == "parquet" and self.path.suffix.lower() in _COMPRESSIONS:
            raise TableError(f"{path}: a Parquet file must not be compressed again; it is compressed inside")

    def columns(self) -> list[str]:
        """Names of the columns. Those of JSONL are all that occur in some row, which takes a pass over the file.

        Raises:
            TableError: the file cannot be read, or two columns have the same name.
        """
        if self.kind == "jsonl":
            return list(dict.fromkeys(name for row in self.rows() if isinstance(row, dict) for name in row))
        with self._file() as file:
            if self.kind == "parquet":
                names = list(_parquet().ParquetFile(file).schema_arrow.names)
            else:
                names = list(_csv_reader(file).fieldnames or [])
        for name in names:
            if names.count(name) > 1:
                raise TableError(f"{self.path} has more than one column {name!r}: rename or remove one")
        return names

    def rows(self) -> Iterator[Row | bytes]:
        """All rows, in order. A line of JSONL that is no object comes as its bytes, to get its error with the others.

        Raises:
            TableError: the file cannot be read, or a row of a CSV has more cells than there are columns.
        """
        with self._file() as file:
            if self.kind == "parquet":
                for batch in _parquet().ParquetFile(file).iter_batches(batch_size=1024):
                    yield from batch.to_pylist()
            elif self.kind == "csv":
                reader = _csv_reader(file)
                for row in reader:
                    if None in row:
                        raise TableError(
                            f"{self.path}, line {reader.line_num}: more cells than the header has; quote the commas"
                        )
                    yield cast(Row, row)
            else:
                for number, line in enumerate(file):
                    yield _json_row(line if number else line.removeprefix(codecs.BOM_UTF8))

    @contextmanager
    def _file(self) -> Iterator[BinaryIO]:
        with open_decompressed(self.path) as file:
            try:
                yield file
            except UnicodeDecodeError as error:
                raise TableError(
                    f"cannot read {self.path}: it is not UTF-8 ({error.reason}); convert it with iconv"
                ) from None
            except (ValueError, csv.Error) as error:  # not Parquet, not CSV
                raise TableError(f"cannot read {self.path}: {error}") from None


@contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed if its name ends in .gz or .zst.

    Raises:
        TableError: the file cannot be read, is damaged, or needs a package that is not installed.
    """
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path, "rb") as file:
                yield cast(BinaryIO, file)
        elif path.suffix.lower() == ".zst":
            arrow = _arrow()
            with (
                arrow.CompressedInputStream(arrow.OSFile(str(path)), "zstd") as stream,
                io.BufferedReader(stream) as file,
            ):
                yield cast(BinaryIO, file)
        else:
            with path.open("rb") as file:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TableError(f"cannot read {path}: {reason}") from None


def decompress(path: Path, destination: Path) -> None:
    """Write the decompressed content of `path` to `destination`, as the input of requests must be a plain file.

    Raises:
        TableError: `path` cannot be read.
        OSError: `destination` cannot be written.
    """
    with open_decompressed(path) as source, write_atomically(destination) as file:
        while data := source.read(_COPY_BYTES):
            file.write(data)


def _csv_reader(file: BinaryIO) -> "csv.DictReader[str]":
    csv.field_size_limit(MAX_LINE_BYTES)  # a text of a million tokens is one cell
    return csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)


def _json_row(line: bytes) -> Row | bytes:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return line


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise TableError("Parquet and zst files need pyarrow: pip install 'hpcgen[data]'") from None
    return pyarrow


def _parquet() -> Any:
    _arrow()
    import pyarrow.parquet

    return pyarrow.parquet
