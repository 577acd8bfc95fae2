"""The nodes of an instance as its checkpoints see them: one in this process, or those of all ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hpcgen.checkpoint.node_tasks import Load, Loaded, NodeCheckpoint, page_layout
from hpcgen.checkpoint.writer import CheckpointFailed, PageLayout
from hpcgen.cluster.coordinator import Coordinator
from hpcgen.cluster.errors import RankLost
from hpcgen.cluster.messages import YieldAll
from hpcgen.cluster.world import World
from hpcgen.engine.build import RankAssembly
from hpcgen.engine.engine import Engine


class Nodes(Protocol):
    """Carry out the tasks of `checkpoint.node_tasks`."""

    pages: int
    """Of the host store of each node."""
    layout: PageLayout
    in_place: bool
    """Whether the host stores are used in place. Else pages of an ACTIVE sequence may lag behind its device."""

    @property
    def count(self) -> int:
        """They are fewer when some were lost."""

    @property
    def ranks(self) -> float:
        """Of a node, on average."""

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
        self._world, self._assembly, self._checkpoints = world, assembly, checkpoints
        self._node: NodeCheckpoint | None = None
        self._ranks = 0
        assembly.executor.side_task = self._perform

    def close(self) -> None:
        if self._node is not None:
            self._node.close()

    def _perform(self, task: object) -> object:
        if isinstance(task, YieldAll):
            self._assembly.executor.suspend_all()
            return None
        if self._ranks != self._world.size:
            # Where ranks were lost, nodes have other numbers and leaders, and what was being written does not count.
            self.close()
            self._ranks, self._node = self._world.size, None
            if self._world.is_leader:
                self._node = NodeCheckpoint(self._checkpoints, self._world.node_index, self._assembly.store)
        return self._node.perform(task) if self._node is not None else None


class RankNodes:
    """The nodes of all ranks, as rank 0 reaches them."""

    def __init__(self, world: World, coordinator: Coordinator, assembly: RankAssembly, checkpoints: Path) -> None:
        self.pages, self.layout = assembly.store.count, page_layout(assembly.store.layout)
        self.in_place = assembly.device.keeps_kv
        self._coordinator, self._own = coordinator, RankTasks(world, assembly, checkpoints)

    @property
    def count(self) -> int:
        return self._coordinator.nodes

    @property
    def ranks(self) -> float:
        return self._coordinator.ranks / self._coordinator.nodes

    def ask(self, tasks: Mapping[int, object]) -> dict[int, Any]:
        try:
            return self._coordinator.ask_leaders(tasks)
        except RankLost as loss:
            failure = CheckpointFailed(f"{loss}.")
            return {node: Loaded() if isinstance(task, Load) else failure for node, task in tasks.items()}

    def node_of(self, sequence: int) -> int:
        return self._coordinator.node_of(sequence) or 0

    def close(self) -> None:
        self._own.close()


def nodes_of(world: World, engine: Engine | Coordinator, assembly: RankAssembly, checkpoints: Path) -> Nodes:
    """Those of the instance that `engine` schedules."""
    if isinstance(engine, Coordinator):
        return RankNodes(world, engine, assembly, checkpoints)
    return OneNode(assembly, checkpoints)
