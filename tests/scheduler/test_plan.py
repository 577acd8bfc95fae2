import pickle

from hypothesis import given
from hypothesis import strategies as st

from hpcgen.scheduler import Chunk, Chunks

NUMBERS = st.integers(0, 2**40)


@given(st.lists(st.builds(Chunk, NUMBERS, NUMBERS, NUMBERS)))
def test_chunks_are_what_was_put_in_also_after_a_journey(chunks) -> None:
    packed = Chunks(chunks)
    for each in (packed, pickle.loads(pickle.dumps(packed))):
        assert list(each) == chunks and len(each) == len(chunks) and each == packed
        assert each.sequences == [chunk.sequence for chunk in chunks]
        assert each.tokens == sum(chunk.tokens for chunk in chunks)


def test_whole_sequences_begin_at_their_first_token() -> None:
    chunks = Chunks()
    chunks.add_whole([4, 7], [10, 64])
    assert list(chunks) == [Chunk(4, 0, 10), Chunk(7, 0, 64)]
