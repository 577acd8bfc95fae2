import pickle
from array import array

from hypothesis import given
from hypothesis import strategies as st

from hpcgen.cluster.messages import Change, SequenceState, apply_change
from hpcgen.sequence import SamplingParams, Sequence, Status, TokenLogprob


def sequence(output: list[int], pages: list[int]) -> Sequence:
    return Sequence(
        7, 3, 1, array("I", [5, 6]), SamplingParams(max_tokens=9, key=2**63), array("I", output),
        Status.SUSPENDED, 2, pages, logprobs=[TokenLogprob(4, -0.5, ((4, -0.5),))],
    )  # fmt: skip


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.integers(0, 2**31 - 1)))
def test_a_sequence_survives_the_way_to_another_rank(output: list[int], pages: list[int]) -> None:
    before = sequence(output, pages)
    after = pickle.loads(pickle.dumps(SequenceState.of(before))).sequence()
    for name in Sequence.__slots__:
        assert getattr(after, name) == getattr(before, name), name
    after.pages.append(1)
    assert before.pages == pages


def test_changes_bring_a_copy_up_to_date() -> None:
    copy = sequence([8], [40, 41])
    apply_change(copy, Change(7, Status.ACTIVE, 66, array("I", [9, 10]).tobytes(), 2, [43], [], []))
    assert list(copy.output) == [8, 9, 10] and copy.pages == [40, 41, 43]
    assert copy.status is Status.ACTIVE and copy.kv_length == 66
    apply_change(copy, Change(7, Status.WAITING, 0, b"", 0, [], [], []))
    assert copy.pages == [] and copy.kv_length == 0
