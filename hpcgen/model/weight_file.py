"""The weight file, memory-mapped: every tensor is a view of the page cache that all ranks of a node share."""

import mmap
import os
import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.weight_format import ALIGNMENT, LARGEST_HEADER, Entry, Record, WeightFileError, decode

_MADV_POPULATE_READ = 22  # Linux 5.14; Python's mmap has no name for it


class WeightFile:
    """A weight file, open for reading.

    The mapping is shared and read-only: ranks of a node that open the same file use the same memory, and writing to a
    tensor of it ends the process. Nothing is read until a tensor is used, or `prefetch` or `populate` asks for it.

    Raises:
        WeightFileError: not a weight file, damaged, or cut off.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                # An empty file cannot be mapped; `decode` says what is wrong with it.
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
                if self._mapping is not None and hasattr(mmap, "MADV_HUGEPAGE"):
                    # What is read into the page cache from now on is read in large pages, where the file system can.
                    self._mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as problem:
            raise WeightFileError(f"Cannot read the weight file {self.path}: {problem.strerror}.") from problem
        head = b""
        if self._mapping is not None:
            length = int.from_bytes(self._mapping[:8], "little")
            head = self._mapping[: min(8 + length, LARGEST_HEADER + 8)]
        self.header = decode(self.path, head, size)
        self._records = {record.name: record for record in self.header.records}
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns of arrays that are; nothing here writes.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            self._bytes = torch.from_numpy(np.frombuffer(self._mapping or b"", dtype=np.uint8))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stored weights, in file order: those of the transformers model's state dict."""
        return tuple(self._records)

    @property
    def aliases(self) -> dict[str, str]:
        """Tied weights: name -> the stored name. Every method that takes a name takes these too."""
        return self.header.aliases

    @property
    def model_config(self) -> dict[str, Any]:
        """config.json of the model."""
        return self.header.model_config

    @property
    def source(self) -> str:
        """Fingerprint of the checkpoint that the file was made from."""
        return self.header.source

    @cached_property
    def units(self) -> dict[str, tuple[str, ...]]:
        """Unit -> names of its weights, in the order of a forward pass. Stored weights only, no aliases."""
        units: dict[str, list[str]] = {}
        for record in self.header.records:
            units.setdefault(record.unit, []).append(record.name)
        return {unit: tuple(names) for unit, names in units.items()}

    def record(self, name: str) -> Record:
        """Where and how a weight is stored. Raises KeyError."""
        return self._records[self.header.aliases.get(name, name)]

    def get(self, name: str) -> StoredTensor:
        """A weight, without copying. Raises KeyError."""
        return _view(self._bytes, 0, self.record(name))

    def raw(self, name: str) -> torch.Tensor:
        """The bytes of a weight's data as uint8 [bytes], without its scales and without copying."""
        entry = self.record(name).data
        return self._bytes[entry.start : entry.stop]

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        """Bytes [start, stop) of the file as uint8, without copying."""
        return self._bytes[start:stop]

    def checksum(self, name: str) -> int:
        """CRC-32 of a weight's data, as it was when the file was written."""
        return self.record(name).data.crc32

    def unit_names(self, unit: str) -> tuple[str, ...]:
        """Names of a unit's weights. Raises KeyError; a tied head has no unit, its weight is the embedding's."""
        return self.units[unit]

    def range(self, names: Iterable[str]) -> tuple[int, int]:
        """The byte range of the file, whole pages, that holds these weights and no others.

        Raises:
            ValueError: there are other weights between them.
        """
        wanted = {self.record(name).name for name in names}
        records = [record for record in self.header.records if record.name in wanted]
        if not records:
            raise ValueError("no names given")
        order = list(self._records)
        first, last = order.index(records[0].name), order.index(records[-1].name)
        if last - first + 1 != len(records):
            stranger = next(name for name in order[first:last] if name not in wanted)
            raise ValueError(f"{stranger} lies between {records[0].name} and {records[-1].name}")
        return records[0].start, -(-records[-1].stop // ALIGNMENT) * ALIGNMENT

    def unit_range(self, unit: str) -> tuple[int, int]:
        """The byte range of a unit: what a ring buffer copies at once."""
        return self.range(self.unit_names(unit))

    def unit_bytes(self, unit: str) -> int:
        """Bytes of a unit, padding included."""
        start, stop = self.unit_range(unit)
        return stop - start

    def unit_pieces(self, unit: str) -> tuple[torch.Tensor]:
        """The byte range of a unit as uint8, without copying."""
        return (self.bytes(*self.unit_range(unit)),)

    def view_in(self, buffer: torch.Tensor, start_offset: int, name: str) -> StoredTensor:
        """A weight, seen in a copy of a part of the file.

        Args:
            buffer: uint8, on any device; aligned as the file is, to 16 bytes at least.
            start_offset: position in the file that the buffer's first byte was copied from.
        """
        return _view(buffer, start_offset, self.record(name))

    def unit_views(self, unit: str, buffer: torch.Tensor) -> dict[str, StoredTensor]:
        """The weights of a unit, seen in a copy of its byte range at the start of `buffer` (uint8)."""
        names = self.unit_names(unit)
        start, _ = self.range(names)
        return {name: self.view_in(buffer, start, name) for name in names}

    def prefetch(self, names: Sequence[str]) -> None:
        """Asks the kernel to start reading these weights; returns at once."""
        self._advise(names, mmap.MADV_WILLNEED)

    def populate(self, names: Sequence[str]) -> None:
        """Reads these weights and maps their pages, so that using them faults no more; returns when done."""
        try:
            self._advise(names, _MADV_POPULATE_READ)
        except OSError:  # a kernel before 5.14, or a file system that cannot
            start, stop = self.range(names)
            self._bytes[start:stop:ALIGNMENT].sum()

    def _advise(self, names: Sequence[str], advice: int) -> None:
        start, stop = self.range(names)
        assert self._mapping is not None  # a file without bytes has no names
        self._mapping.madvise(advice, start, stop - start)


def _view(buffer: torch.Tensor, origin: int, record: Record) -> StoredTensor:
    scale = _tensor(buffer, origin, record.scale) if record.scale else None
    return StoredTensor(
        _tensor(buffer, origin, record.data), record.shape, record.layout, scale=scale, block=record.block
    )


def _tensor(buffer: torch.Tensor, origin: int, entry: Entry) -> torch.Tensor:
    return buffer[entry.start - origin : entry.stop - origin].view(entry.dtype).view(entry.shape)
