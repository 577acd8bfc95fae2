"""Finds the newest checkpoint that is whole, and reads sequences and pages from it."""

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import msgspec
import numpy as np

from hpcgen.checkpoint.columns import Columns, decode
from hpcgen.checkpoint.manifest import VERSION, Manifest, NodeFile, epochs, next_epoch, node_path, read_manifest
from hpcgen.checkpoint.writer import FORMAT, PageLayout, digest
from hpcgen.sequence import PAGE_TOKENS, Sequence


class DamagedCheckpoint(Exception):
    """An epoch, or a page of it, is not what was written."""


Key = tuple[int, int]
"""(request, sample): names a sequence in every job of a run."""


@dataclass(frozen=True)
class StoredKV:
    """Where the KV of a sequence's first tokens lies."""

    path: Path
    rows: tuple[int, ...]
    """Row of page i in /pages/data."""
    tokens: int
    """Tokens whose KV these pages hold; at most what the sequence has."""


class StoredPages:
    """Reads pages of KV; the files stay open until `close`."""

    def __init__(self) -> None:
        self._open: dict[Path, h5py.File] = {}

    def load(self, kv: StoredKV, index: int, destination: memoryview) -> None:
        """Reads page `index` of a sequence into `destination`, uint8 [page_bytes].

        Raises:
            DamagedCheckpoint: the page is not what was written; the KV from here on must be recomputed.
        """
        row = kv.rows[index]
        try:
            if kv.path not in self._open:
                self._open[kv.path] = h5py.File(kv.path, "r")
            pages = self._open[kv.path]["pages"]
            pages["data"].read_direct(np.frombuffer(destination, np.uint8), np.s_[row])
            expected = int(pages["crc32"][row])
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            raise DamagedCheckpoint(f"page {row} of {kv.path} cannot be read: {error}") from error
        if zlib.crc32(destination) != expected:
            raise DamagedCheckpoint(f"page {row} of {kv.path} has a wrong checksum")

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


@dataclass
class Checkpoint:
    """All nodes' parts of one epoch. Any number of nodes can take them over."""

    manifest: Manifest
    sequences: list[Sequence]
    """All sequences, FINISHED samples of unfinished requests among them; in order of `id`, without pages.
    `kv_length` is what it was; set it to what is loaded."""
    kv: dict[Key, StoredKV]
    """Of the sequences that have any."""
    layout: dict[str, int | str]
    """Of the pages; see `writer.PageLayout`."""

    @property
    def epoch(self) -> int:
        return self.manifest.epoch


@dataclass
class _NodePart:
    path: Path
    columns: Columns
    page_sequence: np.ndarray
    page_index: np.ndarray
    layout: dict[str, int | str]


class CheckpointReader:
    """Reads from the directory that `CheckpointWriter` writes to.

    Args:
        warn: gets a line for each epoch that is passed over, with the reason.
    """

    def __init__(self, directory: Path, warn: Callable[[str], None] | None = None) -> None:
        self.directory = directory
        self._warn = warn or (lambda message: print(f"warning: {message}", file=sys.stderr))

    def latest(self, layout: PageLayout | None = None) -> Checkpoint | None:
        """The newest whole epoch, with the KV of every epoch that still fits it; None where there is none.

        Args:
            layout: of the pages that KV is to be restored into; KV in another one is left out. None: any.
        """
        known = epochs(self.directory)
        if known and next_epoch(self.directory) - 1 > known[0]:
            self._warn(f"checkpoint epoch {next_epoch(self.directory) - 1} was not finished; an earlier one is used")
        newest: Checkpoint | None = None
        for epoch in known:
            try:
                manifest, parts = self._read(epoch)
                if newest is None:
                    sequences = sorted((s for part in parts for s in decode(part.columns)), key=lambda s: s.id)
                    newest = Checkpoint(manifest, sequences, {}, parts[0].layout if parts else {})
            except (DamagedCheckpoint, KeyError, IndexError, ValueError, UnicodeDecodeError) as error:
                self._warn(f"checkpoint epoch {epoch} is damaged and passed over: {error}")
                continue
            self._add_kv(newest, parts, set(manifest.void), dict(newest.layout if layout is None else layout))
        return newest

    def _read(self, epoch: int) -> tuple[Manifest, list[_NodePart]]:
        try:
            manifest = read_manifest(self.directory, epoch)
        except (OSError, msgspec.MsgspecError) as error:
            raise DamagedCheckpoint(f"its manifest cannot be read ({error})") from error
        if manifest.version != VERSION:
            raise DamagedCheckpoint(f"it has version {manifest.version}, this program reads {VERSION}")
        return manifest, [self._read_part(manifest, file) for file in manifest.files]

    def _read_part(self, manifest: Manifest, file: NodeFile) -> _NodePart:
        path = node_path(self.directory, manifest.epoch, file.node)
        try:
            size = path.stat().st_size
            if size != file.size:
                raise DamagedCheckpoint(f"{path.name} has {size} bytes, not {file.size}")
            with h5py.File(path, "r") as h5:
                if h5.attrs.get("format") != FORMAT:
                    raise DamagedCheckpoint(f"{path.name} is no checkpoint of hpcgen")
                columns = _read_datasets(h5["sequences"])
                pages = {name: h5[f"pages/{name}"][...] for name in ("sequence", "index", "crc32")}
                layout = {
                    name.removeprefix("page_layout."): _plain(value)
                    for name, value in h5.attrs.items()
                    if name.startswith("page_layout.")
                }
        except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
            raise DamagedCheckpoint(f"{path.name} cannot be read ({error})") from error
        if digest(columns, pages) != file.digest:
            raise DamagedCheckpoint(f"{path.name} has a wrong checksum")
        return _NodePart(path, columns, pages["sequence"], pages["index"], layout)

    def _add_kv(
        self, checkpoint: Checkpoint, parts: list[_NodePart], void: set[Key], layout: dict[str, int | str]
    ) -> None:
        """Notes the KV in `parts`, of this or an older epoch, where it serves more tokens than what is known."""
        sequences = {(s.request, s.sample): s for s in checkpoint.sequences}
        for part in parts:
            if len(part.page_sequence) and part.layout != layout:
                self._warn(f"{part.path.name} holds KV in another page layout; it is recomputed")
                continue
            for row, rows in _rows_by_sequence(part).items():
                key = (int(part.columns["request"][row]), int(part.columns["sample"][row]))
                sequence = sequences.get(key)
                if sequence is None or key in void:
                    continue
                stored = min(int(part.columns["kv_length"][row]), len(rows) * PAGE_TOKENS)
                tokens = min(stored, _common_tokens(part.columns, row, sequence))
                best = checkpoint.kv.get(key)
                if tokens > (best.tokens if best is not None else 0):
                    checkpoint.kv[key] = StoredKV(part.path, tuple(rows[: -(-tokens // PAGE_TOKENS)]), tokens)


def _rows_by_sequence(part: _NodePart) -> dict[int, list[int]]:
    """Rows of /pages/data of each sequence's pages 0, 1, ..., as far as there is no gap."""
    rows: dict[int, list[int]] = {}
    for row, (sequence, index) in enumerate(zip(part.page_sequence.tolist(), part.page_index.tolist(), strict=True)):
        own = rows.setdefault(sequence, [])
        if index == len(own):
            own.append(row)
    return rows


def _common_tokens(columns: Columns, row: int, sequence: Sequence) -> int:
    """Leading tokens that the stored sequence and `sequence` share: KV is valid for these alone.

    An older epoch may come from a branch of the run that was lost and generated anew.
    """
    stored = np.concatenate([_row(columns, "prompt", row), _row(columns, "output", row)])
    now = np.frombuffer(sequence.prompt + sequence.output, np.uint32)
    length = min(len(stored), len(now))
    different = np.flatnonzero(stored[:length] != now[:length])
    return int(different[0]) if len(different) else length


def _row(columns: Columns, name: str, row: int) -> np.ndarray:
    offsets = columns[f"{name}/offsets"]
    return columns[f"{name}/values"][offsets[row] : offsets[row + 1]]


def _read_datasets(group: h5py.Group) -> Columns:
    columns: Columns = {}

    def read(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            columns[name] = item[...]

    group.visititems(read)
    return columns


def _plain(value: object) -> int | str:
    return value.decode() if isinstance(value, bytes) else value if isinstance(value, str) else int(value)  # type: ignore[call-overload]
