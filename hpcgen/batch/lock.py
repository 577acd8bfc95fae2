"""One live process a run directory, on file systems shared by nodes.

flock is not dependable on NFS and Lustre; creating a link is atomic on both. Locks are numbered: the one with the
highest number counts, a new owner links the next number, and so no lock is ever taken away by name. The owner touches
its lock; one that was not touched for EXPIRY_SECONDS, by the file system's own clock, is dead: who comes while it is
silent waits for a touch or for that time. On the same host the process is looked up, and a Slurm job that was requeued
knows that its earlier self is gone.
"""

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from hpcgen.durable import FILE_MODE
from hpcgen.errors import HpcgenError

HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 1.0
EXPIRY_SECONDS = 120.0
"""Twelve heartbeats: a shared file system may well stall for a minute."""

_NAME = re.compile(r"lock\.(\d{8})")


class LockedError(HpcgenError):
    """Another live process works in the directory, or has taken it over from this one."""


class Owner(msgspec.Struct, frozen=True):
    """Content of a lock file."""

    host: str
    pid: int
    started: float
    """Unix time at which the process started, for a process id may be used again."""
    nonce: str
    released: bool = False
    job: str | None = None
    """Slurm job, or None outside of Slurm."""
    restart: int = 0
    """How often the job had been requeued."""

    @classmethod
    def this_process(cls, environment: Mapping[str, str] = os.environ) -> "Owner":
        return cls(
            socket.gethostname(), os.getpid(), psutil.Process().create_time(), secrets.token_hex(8),
            job=environment.get("SLURM_JOB_ID"), restart=int(environment.get("SLURM_RESTART_COUNT", 0)),
        )  # fmt: skip

    def is_earlier_self_of(self, other: "Owner") -> bool:
        """Whether Slurm has ended it before it started the other."""
        return self.job is not None and self.job == other.job and self.restart < other.restart


class DirectoryLock:
    """The right to work in a directory, held from construction to `release`. A thread keeps it alive.

    Raises:
        LockedError: a live process holds it.
    """

    def __init__(self, directory: Path, expiry_seconds: float = EXPIRY_SECONDS) -> None:
        self._directory = directory
        self._expiry_seconds = expiry_seconds
        self._owner = Owner.this_process()
        self._path = self._acquire()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="run-directory-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises:
        LockedError: another process has taken the directory over, after this one was silent for too long.
        """
        if self._lost:
            raise LockedError(
                f"another process took {self._directory} over, as this one gave no sign of life for "
                f"{self._expiry_seconds:.0f} s; nothing more is written"
            )

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        if not self._lost:
            # The file stays, so that numbers only rise.
            self._place(msgspec.structs.replace(self._owner, released=True), self._path)

    def beat(self) -> None:
        """Show that the owner lives, and see whether it still is the owner."""
        with suppress(OSError):  # a stall of the file system: the next beat tries again
            if _highest(self._directory) != _number(self._path):
                self._lost = True
                return
            os.utime(self._path)

    def _keep_alive(self) -> None:
        while not self._lost and not self._stop.wait(HEARTBEAT_SECONDS):
            self.beat()

    def _acquire(self) -> Path:
        while True:
            highest = _highest(self._directory)
            self._refuse_if_live(highest)
            path = self._directory / f"lock.{highest + 1:08d}"
            if self._place(self._owner, path, exclusive=True) and _highest(self._directory) == highest + 1:
                break
            # Another process was faster: its lock decides.
            if _read(path) == self._owner:
                path.unlink()
        for number in filter(None, map(_number, list(self._directory.iterdir()))):
            if number > highest:
                continue
            (self._directory / f"lock.{number:08d}").unlink(missing_ok=True)
        return path

    def _refuse_if_live(self, number: int) -> None:
        path = self._directory / f"lock.{number:08d}"
        owner = _read(path) if number else None
        if owner is None or owner.released or owner.is_earlier_self_of(self._owner):
            return
        if _process_lives(owner) if owner.host == self._owner.host else self._is_touched(path):
            raise LockedError(
                f"{self._directory} is in use by process {owner.pid} on {owner.host}; wait for it or end it. "
                f"Its lock is free {self._expiry_seconds:.0f} s after its last sign of life"
            )

    def _is_touched(self, path: Path) -> bool:
        """Waits for the next touch, at most until the lock expires; whether there was one."""
        first = _modified(path)
        while self._age(path) < self._expiry_seconds:
            time.sleep(min(POLL_SECONDS, self._expiry_seconds / 4))
            owner = _read(path)
            if owner is None or owner.released:
                return False
            if _modified(path) != first:
                return True
        return False

    def _age(self, path: Path) -> float:
        """Seconds since the lock was touched. Both times are the file server's, so clocks of hosts may differ."""
        probe = self._directory / f".clock.{self._owner.nonce}"
        probe.touch(FILE_MODE)
        try:
            return probe.stat().st_mtime - path.stat().st_mtime
        except FileNotFoundError:
            return 0.0
        finally:
            probe.unlink()

    def _place(self, owner: Owner, path: Path, exclusive: bool = False) -> bool:
        """Write a lock file that appears whole; False if `exclusive` and the name is taken."""
        aside = self._directory / f".lock.{self._owner.nonce}"
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
            file.write(msgspec.json.encode(owner))
            file.flush()
            os.fsync(file.fileno())
        if not exclusive:
            os.replace(aside, path)
            return True
        with suppress(FileExistsError):
            os.link(aside, path)
        # NFS may report a link that it made as failed, when a reply was lost; the count of links tells the truth.
        made = aside.stat().st_nlink == 2
        aside.unlink()
        return made


def live_owner(directory: Path) -> Owner | None:
    """Who works in a directory on this host, as far as can be seen without trying to; None where nobody does."""
    highest = _highest(directory)
    owner = _read(directory / f"lock.{highest:08d}") if highest else None
    if owner is None or owner.released or owner.host != socket.gethostname() or not _process_lives(owner):
        return None
    return owner


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def holder(directory: Path, expiry_seconds: float = EXPIRY_SECONDS) -> Owner | None:
    """The process that works in a directory, as far as can be seen from here; takes nothing and writes nothing."""
    path = directory / f"lock.{_highest(directory):08d}"
    owner = _read(path)
    if owner is None or owner.released:
        return None
    if owner.host == socket.gethostname():
        return owner if _process_lives(owner) else None
    with suppress(FileNotFoundError):
        return owner if time.time() - path.stat().st_mtime < expiry_seconds else None
    return None


def _number(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def _highest(directory: Path) -> int:
    return max((_number(path) for path in directory.iterdir()), default=0)


def _read(path: Path) -> Owner | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Owner)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _process_lives(owner: Owner) -> bool:
    try:
        return abs(psutil.Process(owner.pid).create_time() - owner.started) < 2
    except psutil.NoSuchProcess:
        return False
