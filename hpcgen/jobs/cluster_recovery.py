"""Checkpoints of a batch on many ranks: every node saves and loads its own KV, rank 0 all the tokens.

Now and then the tokens are saved, which rank 0 has: KV can be recomputed from them at prefill speed, and pages that
other ranks work on cannot be read beside them. Before leaving, with nothing else to do, each node saves its KV too.
"""

from collections.abc import Callable
from pathlib import Path

from hpcgen.batch.results import Results
from hpcgen.checkpoint.manifest import NodeFile, commit, next_epoch
from hpcgen.checkpoint.node_tasks import Load, NodeCheckpoint, Save, page_layout
from hpcgen.checkpoint.reader import Checkpoint
from hpcgen.checkpoint.writer import CheckpointFailed
from hpcgen.cluster.coordinator import Coordinator
from hpcgen.cluster.messages import YieldAll
from hpcgen.cluster.world import World
from hpcgen.engine.build import RankAssembly
from hpcgen.jobs.recovery import RESTORED_SHARE, Recovery, RunningEngine
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.report.events import EventLog
from hpcgen.sequence import Sequence, Status, pages_for


def side_task(world: World, assembly: RankAssembly, checkpoints: Path) -> Callable[[object], object]:
    """What a rank does of the tasks of `checkpoint.node_tasks`; the leader of a node saves and loads for it."""
    node = NodeCheckpoint(checkpoints, world.node_index, assembly.store) if world.is_leader else None

    def perform(task: object) -> object:
        if isinstance(task, YieldAll):
            assembly.executor.suspend_all()
        elif isinstance(task, Save) and node is not None:
            return node.save(task)
        elif isinstance(task, Load) and node is not None:
            return node.load(task)
        return None

    return perform


class ClusterRecovery(Recovery):
    """Saves and restores the unfinished sequences of an instance of many ranks. On rank 0."""

    def __init__(
        self,
        directory: Path,
        coordinator: Coordinator,
        layout: KVLayout,
        pages: int,
        *,
        interval: float,
        events: EventLog,
        say: Callable[[str], None],
    ) -> None:
        """`pages`: of the host store of each node."""
        super().__init__(directory, None, in_place=True, interval=interval, events=events, say=say)
        self._layout = page_layout(layout)
        self._coordinator, self._pages = coordinator, pages
        self._node: dict[int, int] = {}
        """Node that the KV of a restored sequence was loaded into."""

    def save_before_leaving(self, engine: RunningEngine, results: Results, deadline: float | None) -> bool:
        begin = self._clock()
        if not super().save_before_leaving(engine, results, deadline):
            return False
        coordinator = self._coordinator
        parts: dict[int, list[Sequence]] = {node: [] for node in range(coordinator.nodes)}
        for sequence in [*engine.sequences(), *results.unassembled()]:
            parts[coordinator.node_of(sequence.id) or 0].append(sequence)
        left = None if deadline is None else max(deadline - self._clock(), 0.0)
        epoch = next_epoch(self._directory)
        answers = coordinator.ask_leaders({node: Save(epoch, part, left) for node, part in parts.items()}).values()
        files = [answer for answer in answers if isinstance(answer, NodeFile)]
        failures = [answer for answer in answers if isinstance(answer, CheckpointFailed)]
        if not failures:
            try:
                commit(self._directory, epoch, files)
            except OSError as error:
                failures.append(CheckpointFailed(f"checkpoint epoch {epoch} was not completed: {error.strerror}"))
        if failures:
            self._say(f"warning: {failures[0]}")
            return True
        self._events.write(
            "checkpoint", epoch=epoch, sequences=sum(f.sequences for f in files), pages=sum(f.pages for f in files),
            pages_left_out=sum(f.pages_left_out for f in files), bytes=sum(f.size for f in files),
            seconds=round(self._clock() - begin, 3),
        )  # fmt: skip
        return True

    def _take_back(self, engine: RunningEngine, sequence: Sequence) -> None:
        self._coordinator.add(sequence, self._node.pop(sequence.id, None))

    def _load_kv(self, checkpoint: Checkpoint, sequences: list[Sequence], prefill_rate: float | None) -> int:
        """Spreads the sequences over the nodes, oldest first; each node loads its own."""
        coordinator = self._coordinator
        room = [int(self._pages * RESTORED_SHARE)] * coordinator.nodes
        tasks: dict[int, list[tuple[int, int, int, int]]] = {node: [] for node in range(coordinator.nodes)}
        for sequence in sequences:
            sequence.kv_length, sequence.pages, sequence.status = 0, [], Status.WAITING
            stored = checkpoint.kv.get((sequence.request, sequence.sample))
            if stored is None:
                continue
            tokens = min(stored.tokens, sequence.length - 1)
            node = max(range(coordinator.nodes), key=room.__getitem__)
            needed = pages_for(max(tokens, sequence.prefill_target))
            if tokens and needed <= room[node]:
                room[node] -= needed
                tasks[node].append((sequence.id, sequence.request, sequence.sample, tokens))
        by_id = {sequence.id: sequence for sequence in sequences}
        total = 0
        for node, answer in coordinator.ask_leaders({n: Load(w) for n, w in tasks.items() if w}).items():
            assert isinstance(answer, dict)
            for key, (pages, tokens) in answer.items():
                sequence = by_id[key]
                sequence.pages, sequence.kv_length, self._node[key] = pages, tokens, node
                complete = tokens >= sequence.prefill_target
                sequence.status = Status.SUSPENDED if complete else Status.PREFILLING
                total += tokens
        return total
