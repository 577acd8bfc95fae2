"""Writes one tensor of the weight file in consecutive parts, with its checksum."""

import errno
import os
import zlib
from dataclasses import replace

import torch

from hpcgen.model.weight_format import Entry, WeightFileError

_SLICE = 4 << 20  # bytes; checksummed, then written, while they are in the cache


class EntryWriter:
    """Fills the place of `entry` in the file `descriptor`. Several may write to one file at once."""

    def __init__(self, descriptor: int, entry: Entry):
        self._descriptor = descriptor
        self._entry = entry
        self._written = 0
        self._crc32 = 0

    def write(self, tensor: torch.Tensor) -> None:
        """Appends the bytes of a tensor.

        Raises:
            WeightFileError: the disk is full.
        """
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        if self._written + len(content) > self._entry.bytes:
            raise ValueError(f"more than the {self._entry.bytes} bytes of {self._entry.key}")
        for start in range(0, len(content), _SLICE):
            part = content[start : start + _SLICE]
            self._crc32 = zlib.crc32(part, self._crc32)
            self._write(part)

    def finish(self) -> Entry:
        """The entry with its checksum."""
        if self._written != self._entry.bytes:
            raise ValueError(f"{self._written} bytes of {self._entry.key}, not {self._entry.bytes}")
        return replace(self._entry, crc32=self._crc32)

    def _write(self, part: memoryview) -> None:
        while part:
            try:
                count = os.pwrite(self._descriptor, part, self._entry.start + self._written)
            except OSError as problem:
                if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise WeightFileError(
                        f"No space left while writing the weight file ({problem.strerror}). Free some, or convert to "
                        "another place: `hpcgen convert MODEL_DIRECTORY FILE`, or set HPCGEN_CACHE."
                    ) from problem
                raise
            part = part[count:]
            self._written += count
