from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.sequence.packing import pack_tokens, unpack_tokens


@given(st.integers(1, 32).flatmap(lambda bits: st.lists(st.integers(0, 2**bits - 1), max_size=200)))
def test_tokens_come_out_as_they_went_in(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(array("I", tokens))) == array("I", tokens)


@pytest.mark.parametrize(("vocabulary", "most"), [(49_152, 2.0), (128_256, 2.13), (200_000, 2.26)])
def test_a_token_takes_two_bytes_and_an_eighth_for_each_doubling(vocabulary: int, most: float) -> None:
    tokens = array("I", [index * 7919 % vocabulary for index in range(1000)])
    assert len(pack_tokens(tokens)) <= most * len(tokens) + 1
