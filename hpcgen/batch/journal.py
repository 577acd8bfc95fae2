"""The journal: an append-only file with a record for each finished request.

Layout: a header of 16 bytes, then records of `_RECORD` (size of payload, request, ok, Unix time), payload, CRC-32 of
both. All numbers are little-endian. A record that is torn or damaged ends the journal: what follows is cut off at the
next opening, and those requests are run again.
"""

import os
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hpcgen.durable import FILE_MODE, sync_directory
from hpcgen.errors import HpcgenError

_HEADER = struct.Struct("<8sQ")  # magic, number of requests
_MAGIC = b"HPCGJNL1"
_RECORD = struct.Struct("<IQ?d")
_CRC = struct.Struct("<I")
_BUFFER_BYTES = 2**20


class JournalError(HpcgenError):
    """The journal is not one, belongs to another input, or cannot be written."""


class Records(ABC):
    """Finished requests and their output lines, to be read. In memory 17 bytes a request, however long the lines."""

    def __init__(self, requests: int) -> None:
        self.offsets = np.full(requests, -1, dtype=np.int64)
        """Offset of each request's record in its file; -1 while it is not finished."""
        self.times = np.zeros(requests, dtype=np.float64)
        """Unix time at which each request was finished."""
        self.ok = np.zeros(requests, dtype=bool)
        """Whether each finished request has a result, not an error."""

    def finished(self, request: int) -> bool:
        """Whether there is a record of the request."""
        return bool(self.offsets[request] >= 0)

    def line(self, request: int) -> bytes:
        """The output line of a finished request.

        Raises:
            JournalError: the record has been damaged since it was written.
        """
        offset = int(self.offsets[request])
        if offset < 0:
            raise KeyError(request)
        fd, path = self._file(request)
        head = os.pread(fd, _RECORD.size, offset)
        size = _RECORD.unpack(head)[0]
        rest = os.pread(fd, size + _CRC.size, offset + _RECORD.size)
        if len(rest) < size + _CRC.size or zlib.crc32(rest[:size], zlib.crc32(head)) != _CRC.unpack(rest[size:])[0]:
            raise JournalError(f"{path} is damaged at byte {offset}: resume the run, what is lost is run again")
        return rest[:size]

    @abstractmethod
    def _file(self, request: int) -> tuple[int, Path]:
        """Descriptor and path of the file with the record of a request."""

    def _note(self, request: int, ok: bool, finished: float, offset: int) -> None:
        self.offsets[request] = offset
        self.ok[request] = ok
        self.times[request] = finished


class Journal(Records):
    """The journal that this process writes. A record is durable, and its request counts, after the next `sync`.

    Args:
        path: the file; made if it does not exist.
        requests: number of requests of the input.
        sync_seconds: least time between two fsyncs, so that they cost little on shared storage.
    """

    def __init__(self, path: Path, requests: int, sync_seconds: float = 2.0) -> None:
        super().__init__(requests)
        self.path = path
        self.cut_bytes = 0
        """Bytes of a torn or damaged end that opening cut off."""
        self._sync_seconds = sync_seconds
        self._last_sync = time.monotonic()
        self._pending: list[int] = []
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            self._end = self._recover(requests)
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
            sync_directory(path.parent)
        except OSError as error:
            raise JournalError(f"cannot open the journal {path}: {error.strerror}") from None

    def append(self, request: int, ok: bool, line: bytes) -> None:
        """Record a finished request with its output line, which has no newline.

        Raises:
            JournalError: the file cannot be written.
        """
        if self.finished(request):
            raise ValueError(f"request {request} is finished already")
        now = time.time()
        record = _RECORD.pack(len(line), request, ok, now) + line
        record += _CRC.pack(zlib.crc32(record))
        try:
            _write(self._fd, record, self._end)
        except OSError as error:
            raise JournalError(
                f"cannot write the journal {self.path}: {error.strerror}; free space and resume"
            ) from None
        self._note(request, ok, now, self._end)
        self._end += len(record)
        self._pending.append(request)

    def sync(self, now: bool = False) -> list[int]:
        """Make the records durable, if the interval has passed or `now`.

        Returns:
            The requests that became durable, in the order of finishing.
        """
        if not self._pending or not (now or time.monotonic() - self._last_sync >= self._sync_seconds):
            return []
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise JournalError(f"cannot write the journal {self.path}: {error.strerror}") from None
        self._last_sync = time.monotonic()
        durable, self._pending = self._pending, []
        return durable

    def close(self) -> None:
        self.sync(now=True)
        os.close(self._fd)

    def _file(self, request: int) -> tuple[int, Path]:
        return self._fd, self.path

    def _recover(self, requests: int) -> int:
        """Read what is there; the offset after the last whole record."""
        with os.fdopen(os.dup(self._fd), "rb", buffering=_BUFFER_BYTES) as file:
            total = os.fstat(self._fd).st_size
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                if not (_MAGIC.startswith(header[:8]) or header.startswith(_MAGIC)):
                    raise JournalError(f"{self.path} is not a journal of hpcgen")
                _write(self._fd, _HEADER.pack(_MAGIC, requests), 0)
                return _HEADER.size
            magic, count = _HEADER.unpack(header)
            if magic != _MAGIC:
                raise JournalError(f"{self.path} is not a journal of hpcgen")
            if count != requests:
                raise JournalError(f"{self.path} is of an input of {count} requests, not of {requests}")
            end = _HEADER.size
            while len(head := file.read(_RECORD.size)) == _RECORD.size:
                size, request, ok, finished = _RECORD.unpack(head)
                if request >= requests or end + len(head) + size + _CRC.size > total:
                    break
                payload = file.read(size)
                crc = file.read(_CRC.size)
                if len(crc) < _CRC.size or zlib.crc32(payload, zlib.crc32(head)) != _CRC.unpack(crc)[0]:
                    break
                self._note(request, ok, finished, end)
                end += len(head) + size + _CRC.size
            self.cut_bytes = total - end
            return end


def scan(path: Path) -> Iterator[tuple[int, bool, float]]:
    """(request, ok, Unix time) of each record of a journal that another process may be writing; checksums are not read.

    Raises:
        JournalError: the file is not a journal, or cannot be read.
    """
    for request, ok, finished, _ in locate(path):
        yield request, ok, finished


def locate(path: Path) -> Iterator[tuple[int, bool, float, int]]:
    """As `scan`, with the offset of each record."""
    for request, ok, finished, file, size in _records(path):
        yield request, ok, finished, file.tell() - _RECORD.size
        file.seek(size + _CRC.size, os.SEEK_CUR)


def scan_lines(path: Path) -> Iterator[tuple[int, bool, float, bytes]]:
    """As `scan`, with the output line of each request."""
    for request, ok, finished, file, size in _records(path):
        yield request, ok, finished, file.read(size)
        file.seek(_CRC.size, os.SEEK_CUR)


def _records(path: Path) -> Iterator[tuple[int, bool, float, BinaryIO, int]]:
    """Whole records; the file stands at the payload, which is of that size, and must be moved to the next record."""
    try:
        with open(path, "rb", buffering=_BUFFER_BYTES) as file:
            total = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER.size)
            if len(header) == _HEADER.size and not header.startswith(_MAGIC):
                raise JournalError(f"{path} is not a journal of hpcgen")
            end = _HEADER.size
            while len(head := file.read(_RECORD.size)) == _RECORD.size:
                size, request, ok, finished = _RECORD.unpack(head)
                end += len(head) + size + _CRC.size
                if end > total:
                    return
                yield request, ok, finished, file, size
    except OSError as error:
        raise JournalError(f"cannot read the journal {path}: {error.strerror}") from None


def _write(fd: int, data: bytes, offset: int) -> None:
    """All of `data`: one call may write less, as when a signal comes or the disk is full."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
