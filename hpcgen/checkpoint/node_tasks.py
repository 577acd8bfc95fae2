"""What each node does for a checkpoint: saves the sequences whose KV it has, and loads KV into its host store.

Plain data goes in and comes out: the rank that schedules sends tasks to the leaders of the nodes, whichever way they
are connected, always between two decisions.
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcgen.checkpoint.manifest import NodeFile
from hpcgen.checkpoint.periodic import BackgroundWrite
from hpcgen.checkpoint.reader import DamagedCheckpoint, StoredKV, StoredPages
from hpcgen.checkpoint.restore import RestoreRates, loading_is_cheaper
from hpcgen.checkpoint.writer import CheckpointFailed, CheckpointWriter, PageLayout, PageReader, Snapshot
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore
from hpcgen.sequence import PAGE_TOKENS, pages_for

MEASURED_BYTES = 64 * 2**20
"""Loaded before the rate of loading is believed."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write this node's file of an epoch, while nothing else runs: pages keep still. Answered by its outcome."""

    epoch: int
    snapshot: Snapshot
    seconds: float | None
    """Time in which it must be durable; tokens are written first, then as many pages as fit. None: all."""


@dataclass(frozen=True, slots=True)
class SaveBeside:
    """As Save, while the computation goes on; Saved asks for the outcome."""

    epoch: int
    snapshot: Snapshot
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of the last SaveBeside; None while it is being written."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """KV of a sequence to load."""

    sequence: int
    kv: StoredKV
    tokens: int
    """At most those of `kv`."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load KV into this node's host store, where that is cheaper than to compute it. Answered by Loaded."""

    wanted: list[Wanted]
    prefill_rate: float | None
    """Tokens/s of this node; None: unknown, and all is loaded."""


@dataclass(slots=True)
class Loaded:
    """What is in the host store now."""

    kv: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """Sequence -> (pages, tokens)."""
    warnings: list[str] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0


Outcome = NodeFile | CheckpointFailed
"""Of a save. A failure is returned, not raised: rank 0 decides what it means for the others."""


def page_layout(layout: KVLayout) -> PageLayout:
    """What must be equal where KV is restored."""
    return {name: value if isinstance(value, int) else str(value) for name, value in asdict(layout).items()}


class NodeCheckpoint:
    """Carries out these tasks on one node. Call `close` at the end."""

    def __init__(self, directory: Path, node: int, store: HostStore):
        self._store = store
        self._writer = CheckpointWriter(directory, node, layout=page_layout(store.layout))
        self._saving: BackgroundWrite[NodeFile] | None = None
        self._abandoned = False

    def perform(self, task: object) -> Outcome | Loaded | None:
        """The answer to a task; None to what is no task of a node."""
        if isinstance(task, Save):
            return self._save(task)
        if isinstance(task, SaveBeside):
            self._save_beside(task)
        elif isinstance(task, Saved):
            return self._saved()
        elif isinstance(task, Load):
            return self._load(task)
        return None

    def close(self) -> None:
        """Gives up what is being written beside the computation."""
        self._abandoned = True
        if self._saving is not None:
            self._saving.result()

    def _save(self, task: Save) -> Outcome:
        # What is being written beside costs time that this one needs; without a manifest it never counts.
        self._abandoned = True
        try:
            return self._write(task, self._page)
        except CheckpointFailed as error:
            return error

    def _save_beside(self, task: SaveBeside) -> None:
        def copy(page: int) -> memoryview | None:
            return None if self._abandoned else self._store.pages[page].clone().numpy().data

        self._saving = BackgroundWrite(lambda: self._write(task, copy))

    def _saved(self) -> Outcome | None:
        if self._saving is None:
            return CheckpointFailed("a rank that wrote a checkpoint is gone.")
        return self._saving.result() if self._saving.finished else None

    def _write(self, task: Save | SaveBeside, read: PageReader) -> NodeFile:
        deadline = None if task.seconds is None else time.monotonic() + task.seconds
        return self._writer.write_snapshot(task.epoch, task.snapshot, read, deadline)

    def _load(self, task: Load) -> Loaded:
        loaded, begin = Loaded(), time.monotonic()
        files, page_bytes = StoredPages(), self._store.layout.page_bytes
        for wanted in task.wanted:
            if task.prefill_rate is not None and loaded.bytes >= MEASURED_BYTES:
                rates = RestoreRates(loaded.bytes / (time.monotonic() - begin), task.prefill_rate)
                if not loading_is_cheaper(wanted.tokens, page_bytes, rates):
                    continue
            pages = self._load_sequence(files, wanted, loaded.warnings)
            if pages:
                loaded.kv[wanted.sequence] = pages, min(wanted.tokens, len(pages) * PAGE_TOKENS)
                loaded.bytes += len(pages) * page_bytes
        files.close()
        loaded.seconds = time.monotonic() - begin
        return loaded

    def _load_sequence(self, files: StoredPages, wanted: Wanted, warnings: list[str]) -> list[int]:
        """Pages with the KV of its first tokens, or of those before the first page that is damaged."""
        pages = self._store.allocate(pages_for(wanted.tokens))
        good = 0
        try:
            for good, page in enumerate(pages):
                files.load(wanted.kv, good, self._page(page))
            good = len(pages)
        except DamagedCheckpoint as error:
            warnings.append(f"{error}; the KV from there on is recomputed")
            self._store.release(pages[good:])
        return pages[:good]

    def _page(self, page: int) -> memoryview:
        return self._store.pages[page].numpy().data
