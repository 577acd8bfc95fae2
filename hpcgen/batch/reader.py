"""The input: an index of where each line lies in the file. The requests themselves stay on disk until they are wanted.

A line costs 24 bytes of memory whatever its length: offset, hash and duplicate index are flat arrays.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcgen.batch.request import InvalidRequest, Request, RequestError, custom_id_of, parse_request
from hpcgen.errors import HpcgenError

MAX_LINE_BYTES = 16 * 2**20
"""Longest line that is read. A prompt that fills a context of a million tokens is about 4 MB."""

_CHUNK_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"


class InputError(HpcgenError):
    """The input as a whole cannot be read."""


@dataclass(frozen=True, slots=True)
class Line:
    """Where a line lies, and what is known of it without reading: all that a worker process needs to read it."""

    index: int
    offset: int
    size: int
    """Bytes, with the newline."""
    first: int
    """Index of the first line with the same custom_id; its own index where there is none before it."""


class BatchInput:
    """Index of the lines of an OpenAI Batch file (JSONL).

    Opening reads the file twice: once for line ends and the SHA-256, once for duplicate `custom_id`s.

    Raises:
        InputError: the file cannot be read, or is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str], max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.path = Path(path)
        self.max_line_bytes = max_line_bytes
        # Before it is opened: a pipe that nobody writes to would wait for ever.
        if self.path.exists() and not self.path.is_file():
            raise InputError(f"the input {self.path} is not a regular file: it is read more than once")
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot read the input {self.path}: {error.strerror}") from None
        try:
            self._starts, self.sha256 = self._find_lines()
            self._first = self._find_duplicates()
        except OSError as error:
            raise InputError(f"cannot read the input {self.path}: {error.strerror}") from None

    def __len__(self) -> int:
        """Number of lines. What follows the last newline is a line only if it is not empty."""
        return len(self._starts) - 1

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return int(self._starts[-1])

    def close(self) -> None:
        os.close(self._fd)

    def line(self, index: int) -> Line:
        start, stop = int(self._starts[index]), int(self._starts[index + 1])
        return Line(index, start, stop - start, int(self._first[index]))

    def read(self, index: int) -> Request | RequestError:
        """The request at `index`, or why it is none."""
        return read_line(self._fd, self.line(index), self.max_line_bytes)

    def _find_lines(self) -> tuple[np.ndarray, str]:
        """Starts of all lines and the end of the file: uint64 [lines + 1]."""
        digest = hashlib.sha256()
        ends = []
        size = 0
        last = b"\n"
        while chunk := os.pread(self._fd, _CHUNK_BYTES, size):
            digest.update(chunk)
            found = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
            ends.append(found.astype(np.uint64) + np.uint64(size + 1))
            size += len(chunk)
            last = chunk[-1:]
        if last != b"\n":
            ends.append(np.array([size], dtype=np.uint64))
        first = len(_BOM) if os.pread(self._fd, len(_BOM), 0) == _BOM else 0
        if size == first:
            ends = []
        return np.concatenate([np.array([first], dtype=np.uint64), *ends]), digest.hexdigest()

    def _find_duplicates(self) -> np.ndarray:
        """For each line the index of the first with its custom_id: uint32 [lines].

        Lines are sorted by a 64-bit hash of the custom_id; only those whose hash occurs again are read again.
        """
        first = np.arange(len(self), dtype=np.uint32)
        hashes = np.zeros(len(self), dtype=np.uint64)
        has_id = np.zeros(len(self), dtype=bool)
        for index in range(len(self)):
            custom_id = self._custom_id(index)
            if custom_id is not None:
                hashes[index] = hash(custom_id) & (2**64 - 1)
                has_id[index] = True
        candidates = first[has_id]
        order = candidates[np.argsort(hashes[has_id], kind="stable")]
        again = np.flatnonzero(np.diff(hashes[order]) == 0)  # positions in `order` followed by the same hash
        for group in np.split(again, np.flatnonzero(np.diff(again) > 1) + 1):
            if not len(group):
                continue
            firsts: dict[str, int] = {}
            for index in order[group[0] : group[-1] + 2].tolist():
                custom_id = self._custom_id(index)
                if custom_id is not None:
                    first[index] = firsts.setdefault(custom_id, index)
        return first

    def _custom_id(self, index: int) -> str | None:
        start, stop = int(self._starts[index]), int(self._starts[index + 1])
        if stop - start > self.max_line_bytes:
            return None
        return custom_id_of(os.pread(self._fd, stop - start, start))


def read_line(fd: int, line: Line, max_line_bytes: int = MAX_LINE_BYTES) -> Request | RequestError:
    """Read and parse one line of the open file `fd`."""
    number = line.index + 1
    if line.size > max_line_bytes:
        reason = f"the line has {line.size} bytes, more than the limit of {max_line_bytes}"
        return RequestError.of(InvalidRequest("line_too_long", reason), number, None)
    data = os.pread(fd, line.size, line.offset)
    try:
        request = parse_request(line.index, data.rstrip(b"\r\n"))
        if line.first != line.index:
            raise InvalidRequest(
                "duplicate_custom_id",
                f"custom_id {request.custom_id!r} is used by line {line.first + 1} already; it must be unique",
                "custom_id",
            )
    except InvalidRequest as error:
        return RequestError.of(error, number, custom_id_of(data))
    return request
