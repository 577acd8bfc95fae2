from hypothesis import given
from hypothesis import strategies as st

from hpcgen.scheduler.queue import Queue

operations = st.lists(st.tuples(st.sampled_from(["push", "remove", "pop"]), st.integers(0, 30)), max_size=200)


@given(operations)
def test_a_queue_gives_its_oldest_member_whatever_was_removed_from_its_middle(steps):
    queue = Queue()
    model: set[int] = set()
    for operation, value in steps:
        if operation == "push":
            queue.push(value)
            model.add(value)
        elif operation == "remove":
            queue.remove(value)
            model.discard(value)
        elif model:
            first = queue.first()
            assert first == min(model)
            queue.remove(first)
            model.remove(first)
        assert len(queue) == len(model)
        assert queue.first() == (min(model) if model else None)
    assert set(queue) == model
    assert list(queue.oldest_first()) == sorted(model)
