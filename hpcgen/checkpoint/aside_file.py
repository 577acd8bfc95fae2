"""The file object under HDF5: it writes aside of the final name, and remembers the first error instead of raising it.

HDF5 cannot close a file whose disk is full: it keeps it open and complains until the process ends. So writes seem to
succeed, the error is asked for at points of our choice, and a file with an error never gets its name.
"""

import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


class AsideFile(io.RawIOBase):
    """`path` with a suffix, until `publish`."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the directory cannot be written to."""
        self.path = path
        self.aside = path.with_name(f".{path.name}.part")
        self.error: OSError | None = None
        self._position = 0
        self._fd = os.open(self.aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                _write_all(self._fd, view, self._position)
            except OSError as error:
                self.error = error
        self._position += len(view)
        return len(view)

    def readinto(self, buffer: Any) -> int:
        read = os.preadv(self._fd, [buffer], self._position)
        self._position += read
        return read

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            offset += os.fstat(self._fd).st_size
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        size = self._position if size is None else size
        if self.error is None:
            try:
                os.ftruncate(self._fd, size)
            except OSError as error:
                self.error = error
        return size

    def sync(self) -> None:
        """Makes what was written durable. Raises the OSError of any write so far, or of the sync."""
        if self.error is None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                self.error = error
        if self.error is not None:
            raise self.error

    def publish(self) -> int:
        """Syncs, closes and gives the file its name; returns its bytes. The directory is not synced. Raises OSError."""
        self.sync()
        size = os.fstat(self._fd).st_size
        self._close()
        os.rename(self.aside, self.path)
        return size

    def discard(self) -> None:
        """Closes and removes what was written aside; does nothing after `publish`."""
        self._close()
        with suppress(OSError):
            os.unlink(self.aside)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    """One call may write less than it was given, as when a signal comes or the disk is full."""
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
