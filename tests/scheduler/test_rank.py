from hypothesis import given
from hypothesis import strategies as st

from hpcgen.scheduler.rank import Rank, Tracked
from hpcgen.sequence import PAGE_TOKENS, pages_for

LENGTHS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), min_size=1, max_size=6)
"""(tokens, tokens more at most) of each sequence."""


@given(LENGTHS, st.integers(1, PAGE_TOKENS), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_lengths_and_pages_by_the_clock_are_those_of_every_sequence_counted_alone(lengths, steps, visits) -> None:
    rank = Rank(0, 0)
    sequences = [Tracked(i, 1, tokens + more, tokens) for i, (tokens, more) in enumerate(lengths)]
    known = [tokens for tokens, _ in lengths]
    for sequence, (tokens, _) in zip(sequences, lengths, strict=True):
        sequence._kv = tokens
    for number, comes in visits:
        rank.grant_until(rank.clock + steps)
        if number < len(sequences):
            sequence = sequences[number]
            if comes and sequence.on is None:
                assert rank.enter(sequence) == sequence.pages
            elif not comes and sequence.on is not None:
                rank.leave(sequence)
        for sequence in rank.active.values():
            assert sequence.pages == pages_for(min(known[sequence.id] + steps, sequence.max_length))
        assert rank.pages == sum(sequence.pages for sequence in rank.active.values())
        rank.clock += steps
        for sequence in list(rank.active.values()):
            known[sequence.id] += steps
            if known[sequence.id] >= sequence.max_length:  # it has ended
                rank.leave(sequence)
                known[sequence.id] = sequence._kv = 1
        assert [sequence.kv_length for sequence in sequences] == known
    for sequence in list(rank.active.values()):
        rank.leave(sequence)
    assert rank.pages == 0 and not any(rank._growing) and not rank._ends
