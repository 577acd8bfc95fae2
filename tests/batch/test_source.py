import gzip
import json

import pyarrow
import pytest

from hpcgen.batch import BatchInput
from hpcgen.batch.source import TemplateOptions, open_source, parse_body
from hpcgen.batch.table import TableError

NOTHING = TemplateOptions()


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("name,text\na,the fox\nb,the dog\n")
    return path


def bodies(source):
    batch_input = BatchInput(source.requests)
    return [batch_input.read(index).body for index in range(len(batch_input))]


def test_a_file_of_requests_is_taken_as_it_is(tmp_path, chat):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(chat()))
    source = open_source(path, tmp_path / "run", NOTHING)
    assert source.requests == path and source.table is None
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_requests_are_decompressed_into_the_run_directory(tmp_path, chat, suffix):
    data = json.dumps(chat()).encode() + b"\n"
    path = tmp_path / f"in.jsonl{suffix}"
    if suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    else:
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(data)
    source = open_source(path, tmp_path / "run", NOTHING)
    assert source.requests == tmp_path / "run" / "requests.jsonl"
    assert source.requests.read_bytes() == data


def test_rows_become_requests_by_the_template(tmp_path, table):
    source = open_source(table, tmp_path / "run", TemplateOptions("{name}: {text}", body={"max_tokens": 7}))
    assert [body.messages[0].content for body in bodies(source)] == ["a: the fox", "b: the dog"]
    assert {body.token_limit for body in bodies(source)} == {7}
    assert source.table is not None


def test_a_column_alone_may_be_the_prompt_and_may_be_completed_as_it_is(tmp_path, table):
    source = open_source(table, tmp_path / "run", TemplateOptions(column="text", completions=True))
    assert [body.text_or_tokens for body in bodies(source)] == ["the fox", "the dog"]


@pytest.mark.parametrize("options", [TemplateOptions("{nothing}"), TemplateOptions(column="nothing")])
def test_a_column_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path, table, options):
    with pytest.raises(TableError, match=r"'nothing'.*name, text"):
        open_source(table, tmp_path / "run", options)


@pytest.mark.parametrize("name", ["in.csv", "in.csv.gz", "in.parquet"])
def test_a_table_without_a_template_is_an_error_that_says_what_to_give(tmp_path, name):
    with pytest.raises(TableError, match="--template"):
        open_source(tmp_path / name, tmp_path / "run", NOTHING)


def test_template_and_column_exclude_each_other(tmp_path, table):
    with pytest.raises(TableError, match="exclude"):
        open_source(table, tmp_path / "run", TemplateOptions("{text}", "text"))


@pytest.mark.parametrize("options", [TemplateOptions(body={"max_tokens": 7}), TemplateOptions(completions=True)])
def test_options_of_rows_are_refused_where_there_are_none(tmp_path, options):
    with pytest.raises(TableError, match="--template"):
        open_source(tmp_path / "in.jsonl", tmp_path / "run", options)


def test_the_same_rows_are_the_same_requests_when_the_run_is_resumed(tmp_path, table):
    made = [open_source(table, tmp_path / "run", TemplateOptions("{text}")).requests.read_bytes() for _ in range(2)]
    assert made[0] == made[1]


@pytest.mark.parametrize("text", ["{", "[1]", '{"messages": []}', '{"prompt": "x"}'])
def test_a_body_that_is_no_object_or_brings_its_own_prompt_is_refused(text):
    with pytest.raises(TableError, match="--body"):
        parse_body(text)


def test_no_body_is_an_empty_one():
    assert parse_body(None) == {}
