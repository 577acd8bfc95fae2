"""Reads a whole weight file and compares it with its checksums: what `hpcgen verify` does."""

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hpcgen.model.weight_file import WeightFile
from hpcgen.model.weight_format import ALIGNMENT, Entry, WeightFileError, gaps

_SLICE = 16 << 20  # bytes that are checked before progress is reported


def verify(
    path: str | os.PathLike, progress: Callable[[int, int], None] | None = None, threads: int | None = None
) -> list[str]:
    """Problems of a weight file, each a sentence; none if every byte of it is as it was written.

    Args:
        progress: called with (bytes checked, bytes in all).
        threads: None takes 4, or the number of cores if that is less.
    """
    try:
        weight_file = WeightFile(path)
    except WeightFileError as problem:
        return [str(problem)]
    problems = [f"{key} starts at byte {start}, within a page." for key, start in _misaligned(weight_file)]
    try:
        with safe_open(Path(path), framework="pt"):
            pass
    except SafetensorError as problem:
        problems.append(f"The safetensors library does not accept the file: {problem}.")
    for start, stop in gaps(weight_file.header):
        if weight_file.bytes(start, stop).any():
            problems.append(f"Bytes {start} to {stop}, between two tensors, are not zero.")
    entries = _entries(weight_file)
    total, done = sum(entry.bytes for entry in entries), 0
    with ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1)) as pool:
        for entry, crc32 in zip(entries, pool.map(lambda entry: _checksum(weight_file, entry), entries), strict=True):
            if crc32 != entry.crc32:
                problems.append(f"{entry.key} is damaged: its checksum is {crc32:08x}, not {entry.crc32:08x}.")
            done += entry.bytes
            if progress is not None:
                progress(done, total)
    return problems


def _entries(weight_file: WeightFile) -> list[Entry]:
    return [entry for record in weight_file.header.records for entry in record.entries]


def _misaligned(weight_file: WeightFile) -> list[tuple[str, int]]:
    return [(entry.key, entry.start) for entry in _entries(weight_file) if entry.start % ALIGNMENT]


def _checksum(weight_file: WeightFile, entry: Entry) -> int:
    crc32 = 0
    for start in range(entry.start, entry.stop, _SLICE):
        crc32 = zlib.crc32(weight_file.bytes(start, min(start + _SLICE, entry.stop)).numpy().data, crc32)
    return crc32
