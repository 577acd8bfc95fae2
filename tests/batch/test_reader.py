import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcgen.batch import BatchInput, InputError, Request, RequestError


def errors(batch):
    return [(error.line, error.code) for error in map(batch.read, range(len(batch))) if isinstance(error, RequestError)]


def test_requests_come_back_by_position(batch_input, chat):
    batch = batch_input([chat(f"id{i}") for i in range(5)])
    assert [batch.read(i).custom_id for i in (4, 0, 2)] == ["id4", "id0", "id2"]
    assert [batch.read(i).line for i in range(5)] == [1, 2, 3, 4, 5]


def test_each_bad_line_gets_its_error_and_the_others_are_read(batch_input, chat):
    lines = [
        chat("a"),
        b"{no json\n",
        b'{"custom_id": "\xff"}\n',
        b"\n",
        b"   \r\n",
        chat(None),
        chat("a"),
        chat("c") | {"url": "/v2"},
        chat("d", temperature=-1),
        chat("e"),
    ]
    batch = batch_input(lines)
    assert errors(batch) == [
        (2, "invalid_json"),
        (3, "invalid_utf8"),
        (4, "blank_line"),
        (5, "blank_line"),
        (6, "missing_custom_id"),
        (7, "duplicate_custom_id"),
        (8, "invalid_url"),
        (9, "invalid_request"),
    ]
    assert isinstance(batch.read(0), Request) and isinstance(batch.read(9), Request)


def test_every_error_message_names_its_line(batch_input, chat):
    batch = batch_input([b"{\n", chat("x", n=0)])
    assert batch.read(0).message.startswith("line 1: ")
    assert batch.read(1).message.startswith("line 2: ")
    assert batch.read(1).custom_id == "x"


def test_a_duplicate_names_the_first_line_that_has_the_id(batch_input, chat):
    batch = batch_input([chat("b"), chat("a"), chat("b"), chat("a"), chat("b")])
    assert [batch.line(i).first for i in range(5)] == [0, 1, 0, 1, 0]
    assert "line 2 already" in batch.read(3).message


def test_the_first_line_with_an_id_counts_even_if_it_is_invalid(batch_input, chat):
    batch = batch_input([chat("a", n=-1), chat("a")])
    assert errors(batch) == [(1, "invalid_request"), (2, "duplicate_custom_id")]


def test_equal_hashes_of_different_ids_are_no_duplicates(batch_input, chat, monkeypatch):
    monkeypatch.setattr("hpcgen.batch.reader.hash", lambda text: 7, raising=False)
    batch = batch_input([chat("a"), chat("b"), chat("a"), chat("c")])
    assert [batch.line(i).first for i in range(4)] == [0, 1, 0, 3]


def test_a_long_line_is_an_error_that_names_size_and_limit(batch_input, chat):
    long = chat("b", messages=[{"role": "user", "content": "x" * 3_000_000}])
    batch = batch_input([chat("a"), long, chat("c")], max_line_bytes=2**20)
    assert errors(batch) == [(2, "line_too_long")]
    assert "1048576" in batch.read(1).message and str(batch.line(1).size) in batch.read(1).message
    assert batch.read(2).custom_id == "c"


def test_a_line_as_long_as_the_limit_is_read(batch_input, chat):
    size = len(json.dumps(chat("a"))) + 1
    assert errors(batch_input([chat("a")], max_line_bytes=size)) == []
    assert errors(batch_input([chat("a")], max_line_bytes=size - 1)) == [(1, "line_too_long")]


def test_lines_may_span_the_chunks_in_which_the_file_is_scanned(batch_input, chat, monkeypatch):
    monkeypatch.setattr("hpcgen.batch.reader._CHUNK_BYTES", 7)
    batch = batch_input([chat(f"id{i}") for i in range(4)])
    assert [batch.read(i).custom_id for i in range(4)] == ["id0", "id1", "id2", "id3"]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_last_line_needs_no_newline(batch_input, chat, end):
    batch = batch_input([chat("a"), json.dumps(chat("b")).encode() + end])
    assert len(batch) == 2 and errors(batch) == []


def test_a_byte_order_mark_and_carriage_returns_are_no_errors(batch_input, chat):
    batch = batch_input([b"\xef\xbb\xbf" + json.dumps(chat("a")).encode() + b"\r\n", chat("b")])
    assert len(batch) == 2 and errors(batch) == []


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_lines(batch_input, content):
    assert len(batch_input([content])) == 0


def test_size_and_hash_are_those_of_the_file(batch_input, chat):
    batch = batch_input([chat("a"), b"garbage"])
    data = batch.path.read_bytes()
    assert (batch.size, batch.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_an_input_that_cannot_be_read_is_one_clear_error(tmp_path):
    with pytest.raises(InputError, match=r"cannot read the input .*missing"):
        BatchInput(tmp_path / "missing")
    with pytest.raises(InputError, match="not a regular file"):
        BatchInput(tmp_path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")),
            st.sampled_from([b"{}", b"", b'{"custom_id": "a"}', b"null", b'"x"', b"\r"]),
            st.sampled_from("abc").map(
                lambda id: json.dumps(
                    {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}
                ).encode()
            ),
        ),
        min_size=1,
    )
)
def test_every_line_is_either_a_request_or_an_error_and_no_id_is_given_out_twice(batch_input, lines):
    batch = batch_input([b"\n".join(lines) + b"\n"])
    assert len(batch) == len(lines)
    found = [batch.read(i) for i in range(len(batch))]
    ids = [item.custom_id for item in found if isinstance(item, Request)]
    assert len(ids) == len(set(ids))
    assert all(item.line == i + 1 for i, item in enumerate(found))
    valid = [json.loads(line)["custom_id"] for line in lines if line.startswith(b'{"custom_id": ') and b"url" in line]
    marks = [line for line in lines if line == b'{"custom_id": "a"}']
    assert set(ids) <= set(valid)
    if not marks:
        assert set(ids) == set(valid)
    batch.close()


MEASURE = """
import resource, sys
from hpcgen.batch.reader import BatchInput
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
batch = BatchInput(sys.argv[1])
for index in range(0, len(batch), 101):
    batch.read(index)
print(len(batch), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def added_mebibytes(tmp_path: Path, lines: int, distinct: int) -> int:
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for index in range(lines):
            body = {"prompt": f"question {index} " + "words " * 20, "max_tokens": 8}
            request = {
                "custom_id": f"request-{index % distinct}",
                "method": "POST",
                "url": "/v1/completions",
                "body": body,
            }
            file.write(json.dumps(request) + "\n")
    answer = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    count, added = map(int, answer.stdout.split())
    assert count == lines
    return added


def test_fifty_thousand_lines_cost_few_bytes_each(tmp_path):
    assert added_mebibytes(tmp_path, 50_000, 50_000) < 15


@pytest.mark.slow
@pytest.mark.parametrize("distinct", [1_000_000, 500_000, 1])
def test_a_million_lines_cost_less_than_300_mebibytes(tmp_path, distinct):
    assert added_mebibytes(tmp_path, 1_000_000, distinct) < 300


@pytest.mark.slow
def test_a_line_of_100_mebibytes_is_not_loaded(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"custom_id": "' + b"x" * (100 * 2**20) + b'"}\n{"custom_id": "a"}\n')
    answer = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    count, added = map(int, answer.stdout.split())
    assert (count, added < 30) == (2, True)


JSON_LIKE = st.lists(
    st.sampled_from([b"{", b"}", b"[", b'"', b"\\", b"\0", b"\xff", b":", b",", b"custom_id", b"9" * 5000])
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=st.binary(max_size=60) | JSON_LIKE.map(b"".join))
def test_whatever_a_line_holds_it_is_a_request_or_an_error_of_its_own(tmp_path, line):
    (tmp_path / "in.jsonl").write_bytes(line.replace(b"\n", b" ") + b"\n{}\n")
    batch_input = BatchInput(tmp_path / "in.jsonl")
    assert isinstance(batch_input.read(0), RequestError)
    assert batch_input.read(1).code in ("missing_custom_id", "invalid_request")
    batch_input.close()
