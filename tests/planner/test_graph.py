import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.planner.graph import Graph


@st.composite
def graphs(draw):
    graph = Graph()
    for index in range(draw(st.integers(1, 9))):
        after = draw(st.sets(st.integers(0, index - 1))) if index else set()
        resource = draw(st.sampled_from(["compute", "copy", "network"]))
        graph.add(f"n{index}", resource, draw(st.integers(0, 20)), after)
    return graph


def longest_path(graph: Graph, last: int) -> float:
    """By trying every path that ends at a node."""
    before = graph.nodes[last].after
    return graph.nodes[last].seconds + max((longest_path(graph, index) for index in before), default=0.0)


@given(graphs())
def test_the_critical_path_is_the_longest_of_all_paths(graph):
    schedule = graph.schedule()
    assert schedule.seconds == max(longest_path(graph, index) for index in range(len(graph.nodes)))


@given(graphs())
def test_the_critical_path_is_a_path_and_its_work_takes_the_whole_time(graph):
    schedule = graph.schedule()
    path = schedule.critical
    assert sum(graph.nodes[index].seconds for index in path) == schedule.seconds
    assert all(first in graph.nodes[then].after for first, then in itertools.pairwise(path))


@given(graphs())
def test_a_resource_does_one_thing_at_a_time(graph):
    schedule = graph.schedule()
    for resource in {node.resource for node in graph.nodes}:
        mine = [i for i, node in enumerate(graph.nodes) if node.resource == resource]
        assert all(schedule.end[a] <= schedule.start[b] for a, b in itertools.pairwise(mine))


def test_a_node_cannot_depend_on_a_later_one():
    with pytest.raises(ValueError, match="does not exist yet"):
        Graph().add("first", "compute", 1.0, [3])
