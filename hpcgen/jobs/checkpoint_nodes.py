"""The nodes of an instance as its checkpoints see them: one in this process, or those of all ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hpcgen.checkpoint.node_tasks import NodeCheckpoint, page_layout
from hpcgen.checkpoint.writer import PageLayout
from hpcgen.cluster.coordinator import Coordinator
from hpcgen.cluster.messages import YieldAll
from hpcgen.cluster.world import World
from hpcgen.engine.build import RankAssembly
from hpcgen.engine.engine import Engine


class Nodes(Protocol):
    """Carry out the tasks of `checkpoint.node_tasks`."""

    count: int
    pages: int
    """Of the host store of each node."""
    ranks: float
    """Of a node, on average."""
    layout: PageLayout
    in_place: bool
    """Whether the host stores are used in place. Else pages of an ACTIVE sequence may lag behind its device."""

    def ask(self, tasks: Mapping[int, object]) -> dict[int, Any]:
        """Node -> task to node -> answer. Between two decisions only."""

    def node_of(self, sequence: int) -> int:
        """The node that has the sequence's KV; any, where it has none."""

    def close(self) -> None:
        """Nothing more will be asked."""


class OneNode:
    """This process."""

    count = 1
    ranks = 1.0

    def __init__(self, assembly: RankAssembly, checkpoints: Path) -> None:
        self.pages, self.layout = assembly.store.count, page_layout(assembly.store.layout)
        self.in_place = assembly.device.keeps_kv
        self._node = NodeCheckpoint(checkpoints, 0, assembly.store)

    def ask(self, tasks: Mapping[int, object]) -> dict[int, Any]:
        return {node: self._node.perform(task) for node, task in tasks.items()}

    def node_of(self, sequence: int) -> int:
        return 0

    def close(self) -> None:
        self._node.close()


class RankTasks:
    """What a rank does between two decisions when rank 0 asks for it; the leader of a node saves and loads for it."""

    def __init__(self, world: World, assembly: RankAssembly, checkpoints: Path) -> None:
        self._executor = assembly.executor
        self._node = NodeCheckpoint(checkpoints, world.node_index, assembly.store) if world.is_leader else None
        assembly.executor.side_task = self._perform

    def close(self) -> None:
        if self._node is not None:
            self._node.close()

    def _perform(self, task: object) -> object:
        if isinstance(task, YieldAll):
            self._executor.suspend_all()
            return None
        return self._node.perform(task) if self._node is not None else None


class RankNodes:
    """The nodes of all ranks, as rank 0 reaches them."""

    def __init__(self, world: World, coordinator: Coordinator, assembly: RankAssembly, checkpoints: Path) -> None:
        self.count, self.ranks = coordinator.nodes, coordinator.ranks / coordinator.nodes
        self.pages, self.layout = assembly.store.count, page_layout(assembly.store.layout)
        self.in_place = assembly.device.keeps_kv
        self._coordinator, self._own = coordinator, RankTasks(world, assembly, checkpoints)

    def ask(self, tasks: Mapping[int, object]) -> dict[int, Any]:
        return self._coordinator.ask_leaders(tasks)

    def node_of(self, sequence: int) -> int:
        return self._coordinator.node_of(sequence) or 0

    def close(self) -> None:
        self._own.close()


def nodes_of(world: World, engine: Engine | Coordinator, assembly: RankAssembly, checkpoints: Path) -> Nodes:
    """Those of the instance that `engine` schedules."""
    if isinstance(engine, Coordinator):
        return RankNodes(world, engine, assembly, checkpoints)
    return OneNode(assembly, checkpoints)
