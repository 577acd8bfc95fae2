"""Whatever the memory, the lengths and the failures: all sequences finish, and nothing is ever over its room."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.scheduler import Limits, Topology
from hpcgen.sequence import pages_for

from .executor import Executor

TOPOLOGIES = [(0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 1), (0, 1, 2, 3)]

lengths = st.tuples(st.integers(1, 300), st.integers(1, 200), st.integers(1, 200))


@st.composite
def clusters(draw):
    sequences = draw(st.lists(lengths, min_size=1, max_size=24))
    largest = max(pages_for(prompt + most - 1) for prompt, most, _ in sequences)
    limits = Limits(
        host_pages=largest + draw(st.integers(0, 40)),
        device_pages=draw(st.none() | st.integers(0, 20).map(lambda extra: largest + extra)),
        wave_tokens=draw(st.sampled_from([50, 64, 256, 4096])),
        max_active=draw(st.sampled_from([1, 2, 8, 64])),
        decision_steps=draw(st.sampled_from([1, 7, 64])),
        watermark=draw(st.sampled_from([0.1, 0.5, 0.9, 1.0])),
        refill_below=draw(st.sampled_from([0.0, 0.5, 1.0])),
        partition_below=draw(st.sampled_from([0, 1, 4])),
        migrate=draw(st.booleans()),
    )
    failures = draw(st.sampled_from([0.0, 0.3]))
    topology = Topology(draw(st.sampled_from(TOPOLOGIES)))
    return sequences, limits, topology, failures, draw(st.integers(0, 1000))


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_every_sequence_finishes_once_within_memory_and_a_bounded_number_of_decisions(cluster):
    sequences, limits, topology, failures, seed = cluster
    executor = Executor(topology, limits, seed, failures)
    for index, (prompt, most, tokens) in enumerate(sequences):
        executor.add(index, prompt, most, tokens)
    tokens = sum(prompt + most for prompt, most, _ in sequences)
    executor.run(most_decisions=200 + 20 * tokens)
    assert sorted(executor.finished) == list(range(len(sequences)))
