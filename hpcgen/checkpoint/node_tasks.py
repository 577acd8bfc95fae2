"""What each node does for a checkpoint: saves the sequences whose KV it has, and loads KV into its host store.

Between two decisions nothing runs, so pages keep still while they are written. Plain data goes in and comes out: rank 0
sends tasks to the leaders of the nodes, whichever way they are connected.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from hpcgen.checkpoint.manifest import NodeFile
from hpcgen.checkpoint.reader import CheckpointReader, DamagedCheckpoint
from hpcgen.checkpoint.writer import CheckpointFailed, CheckpointWriter, PageLayout
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore
from hpcgen.sequence import Sequence, pages_for


@dataclass(frozen=True, slots=True)
class Save:
    """Write this node's file of an epoch."""

    epoch: int
    sequences: list[Sequence]
    seconds: float | None
    """Time in which it must be durable; tokens are written first, then as many pages as fit. None: all."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load KV of the newest checkpoint into this node's host store."""

    wanted: list[tuple[int, int, int, int]]
    """(id, request, sample, tokens) of the sequences."""


def page_layout(layout: KVLayout) -> PageLayout:
    """A KV layout as it stands in a checkpoint."""
    names = ("layers", "first_heads", "first_dim", "second_heads", "second_dim")
    return {name: getattr(layout, name) for name in names} | {"dtype": str(layout.dtype)}


class NodeCheckpoint:
    """Carries out Save and Load on one node."""

    def __init__(self, directory: Path, node: int, store: HostStore):
        self._directory, self._node, self._store = directory, node, store

    def save(self, task: Save) -> NodeFile | CheckpointFailed:
        """A failure is returned: rank 0 decides what it means for the others."""
        writer = CheckpointWriter(self._directory, self._node, layout=page_layout(self._store.layout))
        deadline = None if task.seconds is None else time.monotonic() + task.seconds
        try:
            return writer.write(task.epoch, task.sequences, self._page, deadline)
        except CheckpointFailed as error:
            return error

    def load(self, task: Load) -> dict[int, tuple[list[int], int]]:
        """Id -> (pages, tokens) of what could be loaded. The rest is recomputed."""
        checkpoint = CheckpointReader(self._directory, lambda message: None).latest(page_layout(self._store.layout))
        loaded: dict[int, tuple[list[int], int]] = {}
        if checkpoint is None:
            return loaded
        for sequence, request, sample, tokens in task.wanted:
            stored = checkpoint.kv.get((request, sample))
            if stored is None or pages_for(tokens) > self._store.free:
                continue
            pages = self._store.allocate(pages_for(tokens))
            try:
                for index, page in enumerate(pages):
                    checkpoint.load_page(stored, index, self._page(page))
            except DamagedCheckpoint:
                self._store.release(pages)
            else:
                loaded[sequence] = (pages, tokens)
        checkpoint.close()
        return loaded

    def _page(self, page: int) -> memoryview:
        return self._store.pages[page].numpy().data
