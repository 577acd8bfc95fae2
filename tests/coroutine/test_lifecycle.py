from array import array

from hpcgen.coroutine.lifecycle import Lifecycle
from hpcgen.sequence import SamplingParams, Sequence, Status


def test_a_callback_hears_of_every_entry_to_its_state_and_of_where_the_sequence_came_from() -> None:
    lifecycle, heard = Lifecycle(), []
    lifecycle.on(Status.SUSPENDED, lambda sequence, left: heard.append((sequence.id, sequence.status, left)))
    sequence = Sequence(7, 0, 0, array("I", [1]), SamplingParams(max_tokens=1))
    for status in (Status.PREFILLING, Status.SUSPENDED, Status.SUSPENDED, Status.ACTIVE, Status.SUSPENDED):
        lifecycle.move(sequence, status)
    assert heard == [(7, Status.SUSPENDED, Status.PREFILLING), (7, Status.SUSPENDED, Status.ACTIVE)]
