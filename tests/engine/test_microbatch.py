from array import array
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.engine.microbatch import attention_batch, pack, page_table
from hpcgen.memory.kv.interface import Span
from hpcgen.sequence import SamplingParams, Sequence, pages_for


def span(number: int, start: int, stop: int) -> Span:
    return Span(Sequence(number, 0, 0, array("I", [0]), SamplingParams(max_tokens=1)), start, stop)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=12),
    st.integers(1, 200),
    st.integers(10, 30),
)
def test_microbatches_cover_every_span_in_order_within_their_bounds(
    lengths: list[tuple[int, int]], tokens: int, pages: int
) -> None:
    spans = [span(i, start, start + count) for i, (start, count) in enumerate(lengths)]
    microbatches = pack(spans, tokens, pages)
    for microbatch in microbatches:
        assert 0 < sum(s.stop - s.start for s in microbatch) <= tokens
        assert sum(pages_for(s.stop) for s in microbatch) <= pages
    flat = [part for microbatch in microbatches for part in microbatch]
    for original in spans:
        parts = [part for part in flat if part.sequence is original.sequence]
        assert parts[0].start == original.start and parts[-1].stop == original.stop
        assert all(a.stop == b.start for a, b in pairwise(parts))
    assert [p.sequence.id for p in flat] == sorted(p.sequence.id for p in flat)


def test_pages_that_do_not_hold_one_sequence_are_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(ValueError, match="2 pages do not hold"):
        pack([span(0, 128, 140)], 64, 2)


def test_rows_positions_and_slots_of_a_ragged_batch() -> None:
    table = page_table([[5, 9], [2]])
    assert table.tolist() == [[5, 9], [2, 0]]
    batch = attention_batch(np.array([62, 0]), np.array([66, 2]), table, torch.device("cpu"))
    assert batch.query_offsets.tolist() == [0, 4, 6]
    assert batch.context_lengths.tolist() == [66, 2]
    assert batch.positions.tolist() == [62, 63, 64, 65, 0, 1]
    assert batch.slots.tolist() == [5 * 64 + 62, 5 * 64 + 63, 9 * 64, 9 * 64 + 1, 2 * 64, 2 * 64 + 1]
    assert not batch.decode_only


def test_the_page_table_is_only_as_wide_as_the_longest_context() -> None:
    batch = attention_batch(np.array([3]), np.array([4]), page_table([[7, 8, 9]]), torch.device("cpu"))
    assert batch.page_table.tolist() == [[7]] and batch.decode_only
