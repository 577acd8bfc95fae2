from dataclasses import fields

import pytest

from hpcgen.checkpoint.columns import STORED_FIELDS, STORED_SAMPLING_FIELDS, decode, encode
from hpcgen.sequence import SamplingParams, Sequence
from tests.checkpoint.sequences import assert_equal, rich_sequence, sequence


def test_every_field_of_a_sequence_survives():
    written = [sequence(1), rich_sequence(2), sequence(3, output=0)]
    assert_equal(decode(encode(written)), written)


def test_no_sequences_at_all_survive():
    assert decode(encode([])) == []


def test_there_is_a_column_for_every_field():
    assert {f.name for f in fields(Sequence)} == STORED_FIELDS | {"pages"}
    assert {f.name for f in fields(SamplingParams)} == STORED_SAMPLING_FIELDS


def test_columns_are_a_copy():
    written = sequence(1)
    columns = encode([written])
    before = written.output[:]
    written.output.append(1)
    assert decode(columns)[0].output == before


def test_no_text_is_not_the_same_as_an_empty_text():
    read = decode(encode([sequence(1, text=None), sequence(2, text="")]))
    assert [s.text for s in read] == [None, ""]


def test_a_missing_column_is_an_error():
    columns = encode([sequence(1)])
    del columns["sampling/top_p"]
    with pytest.raises(KeyError):
        decode(columns)
