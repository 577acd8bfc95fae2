"""Whatever the memory, the lengths and the failures: all sequences finish, and nothing is ever over its room."""

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


@settings(max_examples=200, deadline=None)
@given(clusters(), st.data())
def test_the_survivors_of_any_failures_finish_every_sequence(cluster, data):
    sequences, limits, topology, failures, seed = cluster
    executor = Executor(topology, limits, seed, failures)
    for index, (prompt, most, tokens) in enumerate(sequences):
        executor.add(index, prompt, most, tokens)
    survivor = data.draw(st.integers(0, topology.ranks - 1), label="rank that lives")
    mortal = [r for r in range(topology.ranks) if r != survivor]
    for rank in data.draw(st.permutations(mortal), label="order of deaths"):
        for _ in range(data.draw(st.integers(0, 6), label="decisions before the next death")):
            if not executor.scheduler.done:
                executor.step()
        node = topology.node_of_rank[rank]
        lost = data.draw(st.booleans(), label="node lost") and node != topology.node_of_rank[survivor]
        if not executor.scheduler.done and rank not in executor.dead:
            executor.step(kill=(rank, lost))
    tokens = sum(prompt + most for prompt, most, _ in sequences)
    executor.run(most_decisions=300 + 20 * tokens)
    assert sorted(executor.finished) == list(range(len(sequences)))


@settings(max_examples=100, deadline=None)
@given(clusters(), st.integers(1, 5))
def test_sequences_that_arrive_while_others_run_finish_too(cluster, at_once):
    sequences, limits, topology, failures, seed = cluster
    executor = Executor(topology, limits, seed, failures)
    for index, (prompt, most, tokens) in enumerate(sequences):
        executor.add(index, prompt, most, tokens)
        if index % at_once == 0 and not executor.scheduler.done:
            executor.step()
    executor.run(most_decisions=200 + 20 * sum(prompt + most for prompt, most, _ in sequences))
    assert sorted(executor.finished) == list(range(len(sequences)))


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_the_oldest_unfinished_sequence_is_never_set_back(cluster):
    """Where no rank fails and no MIGRATE fails, the KV of the oldest sequence only grows."""
    sequences, limits, topology, _, seed = cluster
    executor = Executor(topology, limits, seed)
    for index, (prompt, most, tokens) in enumerate(sequences):
        executor.add(index, prompt, most, tokens)
    oldest, kv = -1, 0
    while not executor.scheduler.done:
        executor.step()
        if executor.sequences:
            now = min(executor.sequences)
            assert now != oldest or executor.sequences[now].kv >= kv
            oldest, kv = now, executor.sequences[now].kv
