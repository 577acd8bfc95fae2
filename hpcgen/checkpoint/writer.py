"""Writes one node's part of a checkpoint: an HDF5 file, tokens and state first, then pages of KV while time lasts.

Layout (every group and dataset says in an attribute what it is):

    /                 attributes: format, version, epoch, node, created, page layout
    /sequences/...    the columns of `columns`
    /pages/sequence, /pages/index, /pages/crc32   [P]: row of the sequence, number of the page in it, checksum
    /pages/data       uint8 [P, page_bytes], one chunk a page, as it lay in the host store
"""

import hashlib
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpcgen.checkpoint.aside_file import AsideFile
from hpcgen.checkpoint.columns import STATUS_CODES, Columns, encode
from hpcgen.checkpoint.manifest import VERSION, NodeFile, node_path
from hpcgen.checkpoint.order import PageRow, RecomputeCost, recompute_cost, save_order
from hpcgen.errors import HpcgenError
from hpcgen.sequence import PAGE_TOKENS, Sequence

FORMAT = "hpcgen checkpoint"
SYNC_BYTES = 64 * 2**20
"""With a deadline, data is synced this often: what is left to sync when the time is over must be little."""
_SYNC_MARGIN = 1.5
"""The last sync is expected to take this many times the longest before."""

PageReader = Callable[[int], memoryview | None]
"""Bytes of a host page, or None where no more are to be saved."""

PageLayout = Mapping[str, int | str]
"""How a page is laid out, such as the fields of `kernels`' KVLayout: KV is only restored into an equal one."""


class CheckpointFailed(HpcgenError):
    """An epoch could not be written, as when the disk is full. Those before are untouched; the run can go on."""


@dataclass(frozen=True)
class Snapshot:
    """The sequences at one moment, copied: the engine goes on while they are written."""

    columns: Columns
    kv_tokens: list[int]
    """Tokens of each sequence whose KV lies in `pages`."""
    pages: list[list[int]]

    @classmethod
    def of(cls, sequences: list[Sequence], stored: Callable[[Sequence], int] | None = None) -> "Snapshot":
        """`stored`: tokens of a sequence whose KV has reached its host pages; None: `kv_length`, all of it."""
        columns = encode(sequences)
        if stored is not None:
            columns["kv_length"] = np.array([stored(s) for s in sequences], np.int64)
        return cls(columns, columns["kv_length"].tolist(), [list(s.pages) for s in sequences])


class CheckpointWriter:
    """Writes `node`'s files into `directory`, which is shared by all nodes; made if it does not exist."""

    def __init__(
        self,
        directory: Path,
        node: int = 0,
        *,
        layout: PageLayout | None = None,
        cost: RecomputeCost = recompute_cost,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.node = node
        self._layout = dict(layout or {})
        self._cost = cost
        self._clock = clock

    def write(
        self, epoch: int, sequences: list[Sequence], pages: PageReader | None = None, deadline: float | None = None
    ) -> NodeFile:
        """As `write_snapshot`, of the sequences as they are now; they must not change until it returns."""
        return self.write_snapshot(epoch, Snapshot.of(sequences), pages, deadline)

    def write_snapshot(
        self, epoch: int, snapshot: Snapshot, pages: PageReader | None = None, deadline: float | None = None
    ) -> NodeFile:
        """Writes this node's file of an epoch; the epoch counts once `manifest.commit` has all nodes' files.

        Args:
            pages: reads host pages; None: no KV is saved.
            deadline: time of the clock at which the file must be durable; pages that do not fit are left out.

        Raises:
            CheckpointFailed: nothing is left of the attempt.
        """
        path = node_path(self.directory, epoch, self.node)
        file: AsideFile | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = AsideFile(path)
            rows = save_order(snapshot.kv_tokens, snapshot.pages, self._cost) if pages is not None else []
            with h5py.File(file, "w", libver="latest") as h5:
                self._describe(h5, epoch, path)
                _write_columns(h5, snapshot.columns)
                saved = _Pages(h5, file, snapshot.columns)
                if pages is not None and rows:
                    saved.write(rows, pages, deadline, self._clock)
                digest = saved.close()
            size = file.publish()
        except OSError as error:
            reason = file.error if file is not None and file.error is not None else error
            raise CheckpointFailed(
                f"checkpoint epoch {epoch} was not written to {self.directory}: {reason.strerror or reason}."
            ) from error
        finally:
            if file is not None:
                file.discard()
        count = len(snapshot.kv_tokens)
        return NodeFile(path.name, self.node, size, digest, count, saved.count, len(rows) - saved.count)

    def _describe(self, h5: h5py.File, epoch: int, path: Path) -> None:
        h5.attrs.update({"format": FORMAT, "version": VERSION, "epoch": epoch, "node": self.node})
        h5.attrs["created"] = time.time()
        for name, value in self._layout.items():
            h5.attrs[f"page_layout.{name}"] = value


class _Pages:
    """The group /pages while it is written."""

    def __init__(self, h5: h5py.File, file: AsideFile, columns: Columns) -> None:
        self._h5 = h5
        self._file = file
        self._columns = columns
        self._rows: list[PageRow] = []
        self._checksums: list[int] = []

    @property
    def count(self) -> int:
        return len(self._rows)

    def write(self, rows: list[PageRow], pages: PageReader, deadline: float | None, clock: Callable[[], float]) -> None:
        """Appends pages until all are written or the deadline is near. Raises OSError."""
        last_sync = 0.0
        if deadline is not None:
            last_sync = self._timed_sync(clock)
        unsynced = 0
        data: h5py.Dataset | None = None
        for row in rows:
            if deadline is not None and clock() + last_sync * _SYNC_MARGIN >= deadline:
                break
            page = pages(row.page)
            if page is None:
                break
            if data is None:
                data = _create_pages(self._h5, len(page))
            self._append(data, row, page)
            unsynced += len(page)
            if self._file.error is not None:
                raise self._file.error
            if deadline is not None and unsynced >= SYNC_BYTES:
                last_sync, unsynced = max(last_sync, self._timed_sync(clock)), 0

    def _append(self, data: h5py.Dataset, row: PageRow, page: memoryview) -> None:
        count = len(self._rows)
        if count == data.shape[0]:
            data.resize(max(2 * count, 64), axis=0)
        # Past HDF5's type conversion and chunk cache: the bytes go from the host store to the file.
        data.id.write_direct_chunk((count, 0), page)
        self._rows.append(row)
        self._checksums.append(zlib.crc32(page))

    def close(self) -> str:
        """Writes what describes the pages; the digest of all but the pages."""
        columns: Columns = {
            "sequence": np.array([row.sequence for row in self._rows], np.int64),
            "index": np.array([row.number for row in self._rows], np.int32),
            "crc32": np.array(self._checksums, np.uint32),
        }
        if self._rows:
            self._h5["pages/data"].resize(len(self._rows), axis=0)
        for name, values in columns.items():
            self._h5.create_dataset(f"pages/{name}", data=values).attrs["description"] = _PAGE_DESCRIPTIONS[name]
        return digest(self._columns, columns)

    def _timed_sync(self, clock: Callable[[], float]) -> float:
        begin = clock()
        self._file.sync()
        return clock() - begin


def digest(sequences: Mapping[str, np.ndarray], pages: Mapping[str, np.ndarray]) -> str:
    """Checksum of names, types, shapes and contents of all datasets but /pages/data."""
    checksum = hashlib.blake2b(digest_size=16)
    for group in (sequences, pages):
        for name in sorted(group):
            values = np.ascontiguousarray(group[name])
            checksum.update(f"{name} {values.dtype.str} {values.shape};".encode())
            checksum.update(values.data.cast("B") if values.size else b"")
    return checksum.hexdigest()


def _create_pages(h5: h5py.File, page_bytes: int) -> h5py.Dataset:
    data = h5.create_dataset(
        "pages/data", (0, page_bytes), np.uint8, maxshape=(None, page_bytes), chunks=(1, page_bytes)
    )
    data.attrs["description"] = "KV of one page in each row, as it lies in the host store"
    return data


def _write_columns(h5: h5py.File, columns: Columns) -> None:
    for name, values in columns.items():
        if name == "status":
            dataset = h5.create_dataset("sequences/status", data=values, dtype=h5py.enum_dtype(STATUS_CODES, np.uint8))
        else:
            dataset = h5.create_dataset(f"sequences/{name}", data=values)
        leaf = name.rsplit("/", 1)[-1]
        if name in _DESCRIPTIONS or leaf in _LEAF_DESCRIPTIONS:
            dataset.attrs["description"] = _DESCRIPTIONS.get(name) or _LEAF_DESCRIPTIONS[leaf]


_PAGE_DESCRIPTIONS = {
    "sequence": "row in /sequences of the sequence that the page belongs to",
    "index": f"i: the page holds tokens [{PAGE_TOKENS} i, {PAGE_TOKENS} i + {PAGE_TOKENS}) of its sequence",
    "crc32": "CRC-32 of the row of /pages/data",
}
_DESCRIPTIONS = {
    "id": "number of the sequence in the run, rising with arrival",
    "request": "line of the input, from 0",
    "sample": "which of the request's n samples, from 0",
    "kv_length": "tokens whose KV was stored",
    "sampling/key": "key of the random numbers (Philox)",
    "sampling/logprobs": "alternatives asked for with each token; -1: no log-probabilities",
}
_LEAF_DESCRIPTIONS = {
    "values": "all rows, one after the other (token ids, or UTF-8 bytes)",
    "offsets": "row s is [offsets[s], offsets[s + 1])",
    "present": "0 where there is no text, which is not the same as an empty one",
}
