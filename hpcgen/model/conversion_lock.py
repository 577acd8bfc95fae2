"""One conversion at a time, across processes and nodes: a lock file that works on NFS and outlives no one.

The lock only saves work. That a reader never meets half a file is the doing of `atomic_file`, so the rare case in
which two processes both take over the lock of a dead one costs a second conversion and nothing else.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

from hpcgen.model.atomic_file import age
from hpcgen.model.process_identity import describe, is_dead, own_identity

HEARTBEAT = 15.0
"""Seconds between two touches of a held lock."""
STALE_AFTER = 180.0
"""Seconds without one after which another node's lock is taken over; NFS clients may see times 60 s late."""


class ConversionLock:
    """A lock file at `path`. flock is no alternative: on many parallel file systems it is off, or only per node."""

    def __init__(self, path: Path):
        self.path = path
        self._released = threading.Event()

    def acquire(self) -> bool:
        """Takes the lock, from its holder too if that is dead; False if it is held."""
        if self._holder_is_dead():
            self.path.unlink(missing_ok=True)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(own_identity())
        self._released.clear()
        threading.Thread(target=self._beat, name="conversion-lock", daemon=True).start()
        return True

    def release(self) -> None:
        """Gives the lock back, unless another process has taken it over meanwhile."""
        self._released.set()
        if self._identity() == own_identity():
            self.path.unlink(missing_ok=True)

    def holder(self) -> str:
        """Who holds it, for a message."""
        return describe(self._identity() or "another process")

    def _identity(self) -> str | None:
        with suppress(OSError):
            return self.path.read_text() or None
        return None

    def _holder_is_dead(self) -> bool:
        identity = self._identity()
        dead = is_dead(identity) if identity else None
        if dead is not None:
            return dead
        try:
            return age(self.path) > STALE_AFTER
        except FileNotFoundError:
            return False

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT):
            if self._identity() != own_identity():
                return
            with suppress(OSError):
                os.utime(self.path)
