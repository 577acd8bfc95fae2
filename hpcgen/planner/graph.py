"""A directed acyclic graph of timed work, and its critical path by one topological pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Node(NamedTuple):
    """Work on one resource, which does one thing at a time and in the order of the graph."""

    name: str
    resource: str
    seconds: float
    after: tuple[int, ...]
    """Indices of the nodes that must be done first."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Start and end of each node when each starts as soon as it can, and the nodes that decide the end."""

    start: list[float]
    end: list[float]
    critical: list[int]

    @property
    def seconds(self) -> float:
        return max(self.end, default=0.0)


@dataclass(slots=True)
class Graph:
    """Built in topological order: a node comes after all that it depends on."""

    nodes: list[Node] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, resource: str, seconds: float, after: Iterable[int] = ()) -> int:
        """Index of the new node. It also waits for the node before it on its resource."""
        number = len(self.nodes)
        needed = []
        for index in after:
            if index >= number:
                raise ValueError(f"{name} depends on a node that does not exist yet")
            if index >= 0:
                needed.append(index)
        before = self._last.get(resource)
        if before is not None:
            needed.append(before)
        self.nodes.append(Node(name, resource, seconds, tuple(needed)))
        self._last[resource] = number
        return number

    def schedule(self) -> Schedule:
        """Longest path to each node, in one pass; the critical path walks back from the end."""
        start: list[float] = []
        end: list[float] = []
        decisive: list[int] = []
        for node in self.nodes:
            begin, because = 0.0, -1
            for index in node.after:
                if end[index] > begin:
                    begin, because = end[index], index
            start.append(begin)
            end.append(begin + node.seconds)
            decisive.append(because)
        critical = []
        index = max(range(len(end)), key=end.__getitem__, default=-1)
        while index >= 0:
            critical.append(index)
            index = decisive[index]
        return Schedule(start, end, critical[::-1])
