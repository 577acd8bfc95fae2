import gzip

import pyarrow
import pyarrow.parquet
import pytest

from hpcgen.batch.table import Table, TableError, decompress

ROWS = [{"id": "007", "text": 'a "quoted",\nline'}, {"id": "008", "text": "é🙂"}]
CSV = '\ufeffid,text\r\n007,"a ""quoted"",\nline"\r\n008,é🙂\r\n'.encode()
JSONL = '{"id": "007", "text": "a \\"quoted\\",\\nline"}\n{"id": "008", "text": "é🙂"}\n'.encode()


def zstd(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(("compress", "suffix"), [(bytes, ""), (gzip.compress, ".gz"), (zstd, ".zst")])
@pytest.mark.parametrize(("data", "name"), [(CSV, "t.csv"), (JSONL, "t.jsonl"), (JSONL, "t.NDJSON")])
def test_rows_are_the_same_in_every_format_and_compression(tmp_path, data, name, compress, suffix):
    path = tmp_path / (name + suffix)
    path.write_bytes(compress(data))
    assert list(Table(path).rows()) == ROWS
    assert Table(path).columns() == ["id", "text"]


def test_parquet_rows_keep_their_types(tmp_path):
    rows = [{"n": i, "tags": ["a"] * (i % 3)} for i in range(3000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    table = Table(tmp_path / "t.parquet")
    assert list(table.rows()) == rows and table.columns() == ["n", "tags"]


def test_a_line_that_is_no_object_comes_as_it_is(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"a": 1}\n[1]\n\xff\n{"b": 2}')
    assert list(Table(path).rows()) == [{"a": 1}, b"[1]\n", b"\xff\n", {"b": 2}]
    assert Table(path).columns() == ["a", "b"]


def test_a_csv_row_with_too_many_cells_names_its_line(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(TableError, match="line 3: more cells"):
        list(Table(path).rows())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.csv", None),
        ("bad.csv", b"a\n\xff\n"),
        ("bad.jsonl.gz", b"no gzip"),
        ("cut.jsonl.gz", gzip.compress(JSONL * 100)[:-20]),
        ("bad.jsonl.zst", b"no zstd"),
        ("bad.parquet", b"no parquet at all"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TableError, match=f"cannot read .*{name}"):
        list(Table(tmp_path / name).rows())


@pytest.mark.parametrize("name", ["t.txt", "t", "t.gz", "t.xlsx.gz"])
def test_a_name_that_tells_nothing_is_refused(name):
    with pytest.raises(TableError, match=r"must end in \.csv"):
        Table(name)


def test_parquet_in_another_compression_is_refused():
    with pytest.raises(TableError, match="compressed inside"):
        Table("t.parquet.zst")


def test_compressed_requests_are_decompressed(tmp_path):
    path = tmp_path / "requests.jsonl.gz"
    path.write_bytes(gzip.compress(JSONL))
    decompress(path, tmp_path / "requests.jsonl")
    assert (tmp_path / "requests.jsonl").read_bytes() == JSONL


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_two_columns_of_the_same_name_are_refused_before_any_work(tmp_path, name):
    path = tmp_path / name
    if name == "t.csv":
        path.write_text("text,text\na,b\n")
    else:
        columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text"]), path)
    with pytest.raises(TableError, match="more than one column 'text'"):
        Table(path).columns()


def test_a_cell_may_be_as_long_as_a_request(tmp_path):
    (tmp_path / "t.csv").write_text(f"text\n{'x' * 500_000}\n")
    assert [len(row["text"]) for row in Table(tmp_path / "t.csv").rows()] == [500_000]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')
    assert list(Table(tmp_path / "t.jsonl").rows()) == [{"a": 1}, {"a": 2}]


def test_another_encoding_is_an_error_with_its_remedy(tmp_path):
    (tmp_path / "t.csv").write_bytes("text\nhé\n".encode("latin-1"))
    with pytest.raises(TableError, match=r"not UTF-8.*iconv"):
        list(Table(tmp_path / "t.csv").rows())
