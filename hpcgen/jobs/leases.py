"""Which instance of a run works on which sub-batch: leases on shared storage, by atomic rename alone.

Each sub-batch has one token, a file that is always in exactly one place:

    free/000012               nobody works on it
    held/INSTANCE/000012      that instance does
    done/000012@INSTANCE      that instance has finished it, and its journal has the results

Whoever renames the token has it: of several that try, one succeeds, on NFS and Lustre too, where flock is not
dependable. Instances touch `alive/INSTANCE`; tokens of one that has not for `expiry` seconds, by the clock of the file
server, may be taken over. An instance that was only slow learns of it when it completes the sub-batch, and drops its
results: nothing is finished twice.
"""

import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcgen.durable import sync_directory, write_json
from hpcgen.errors import HpcgenError

HEARTBEATS = 18
"""In the time that a lease lives without."""
EXPIRY_SECONDS = 180.0
"""Clients of NFS may show another's touch a minute late, and a shared file system may stall for another."""
AUTOMATIC = ""
"""Stands for the name that `own_name` gives."""
MERGE = "merge"
"""Token of the last work, which is done once, when all sub-batches are: writing the ordered output."""


class LeaseError(HpcgenError):
    """The lease directory cannot be used, or is of a run that was divided otherwise."""


class Lease(NamedTuple):
    """A sub-batch that was acquired."""

    sub_batch: int
    before: str | None
    """The instance that it was taken over from; None: it was free."""


class Division(msgspec.Struct, frozen=True):
    """How the run is divided; the same for all instances."""

    requests: int
    size: int
    """Requests of a sub-batch; the last one may be smaller."""

    @property
    def sub_batches(self) -> int:
        return -(-self.requests // self.size)


class Leases:
    """One instance's view. `open` it, `acquire`, `complete`; a thread shows that the instance lives until `close`.

    An instance that starts again under its name has what it held before, if nobody took it over meanwhile.
    """

    def __init__(self, directory: Path, instance: str, expiry: float = EXPIRY_SECONDS) -> None:
        """
        Args:
            instance: unique among live ones, the same when its job is requeued, and good for a file's name.
            expiry: seconds without a sign of life after which leases may be taken over.
        """
        self.directory = directory
        self.instance = instance
        self._expiry = expiry
        self._free = directory / "free"
        self._held = directory / "held"
        self._done = directory / "done"
        self._own = self._held / instance
        self._alive = directory / "alive" / instance
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.division = Division(0, 1)
        """Of the run, once opened."""
        self._seen_free: list[str] = []
        """Names that were free when the directory was last read; the next to take at the end."""

    def open(self, requests: int, size: int) -> "Leases":
        """Makes the directory if no other instance has, and starts to show life.

        Args:
            requests: of the input.
            size: requests of a sub-batch.

        Raises:
            LeaseError: the run is divided otherwise, or the directory cannot be written.
        """
        wanted = Division(requests, size)
        try:
            if not self.directory.exists():
                self._create(wanted)
            self.division = msgspec.json.decode((self.directory / "division.json").read_bytes(), type=Division)
            if self.division != wanted:
                raise LeaseError(
                    f"{self.directory} divides {self.division.requests:,} requests into sub-batches of "
                    f"{self.division.size:,}, not {requests:,} into those of {size:,}: give all instances the same "
                    "--sub-batch"
                )
            self._own.mkdir(exist_ok=True)
            self.beat()
        except (OSError, msgspec.MsgspecError) as error:
            raise LeaseError(f"cannot use the leases in {self.directory}: {error}") from None
        self._thread = threading.Thread(target=self._keep_alive, name="leases", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Shows no more life; what is held expires, unless it is released."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> "Leases":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def beat(self) -> None:
        """Shows that the instance lives."""
        self._alive.touch()
        os.utime(self._alive)  # now, by the file server's clock

    @property
    def held(self) -> list[int]:
        """Sub-batches that this instance holds, in order."""
        return sorted(int(name) for name in _names(self._own) if name.isdigit())

    def acquire(self) -> Lease | None:
        """Takes a sub-batch: a free one, lowest first, or else one of an instance that has died.

        None is not the end: others may hold what they will not finish. See `all_done`.
        """
        # Listings may be a minute old on NFS: each name is tried, and the directory is read again once at most.
        if (name := self._take_free()) is None:
            self._seen_free = sorted(filter(str.isdigit, _names(self._free)), reverse=True)
            name = self._take_free()
        if name is not None:
            return Lease(int(name), None)
        for instance in self._dead():
            for name in sorted(filter(str.isdigit, _names(self._held / instance))):
                if self._take(self._held / instance / name):
                    return Lease(int(name), instance)
        return None

    def complete(self, sub_batch: int) -> bool:
        """Marks it finished, once its results are durable. False: another instance has taken it over, drop them."""
        name = _name(sub_batch)
        finished = self._rename(self._own / name, self._done / f"{name}@{self.instance}")
        if finished:
            sync_directory(self._done)
        return finished

    def release(self, sub_batch: int) -> None:
        """Gives it back unfinished, as before leaving for long."""
        with suppress(FileNotFoundError):  # taken over
            os.rename(self._own / _name(sub_batch), self._free / _name(sub_batch))

    def reopen(self, sub_batch: int) -> None:
        """Takes back one that this instance had marked finished: its results are lost."""
        self._rename(self._done / f"{_name(sub_batch)}@{self.instance}", self._own / _name(sub_batch))

    @property
    def done(self) -> dict[int, str]:
        """Finished sub-batches, and the instance whose results count."""
        tokens = (name.partition("@") for name in _names(self._done))
        return {int(name): instance for name, _, instance in tokens if name.isdigit()}

    @property
    def all_done(self) -> bool:
        """Whether the results of every sub-batch are durable."""
        return len(self.done) == self.division.sub_batches

    def acquire_merge(self) -> bool:
        """Once all sub-batches are done: whether this instance is the one that merges the results.

        It still is if this is true when asked again, after the merge and before its success is declared.
        """
        if not self.all_done:
            return False
        own = self._own / MERGE
        if own.exists():
            return True
        candidates = [self._free / MERGE, *(self._held / name / MERGE for name in self._dead())]
        return any(self._rename(token, own) for token in candidates)

    def _create(self, division: Division) -> None:
        """Makes the directory aside and renames it into place; another instance may be faster."""
        aside = self.directory.with_name(f".{self.directory.name}.{secrets.token_hex(4)}")
        for name in ("free", "held", "done", "alive"):
            (aside / name).mkdir(parents=True)
        write_json(aside / "division.json", division)
        for name in [*map(_name, range(division.sub_batches)), MERGE]:
            (aside / "free" / name).touch()
        try:
            os.rename(aside, self.directory)
        except OSError:
            if not self.directory.exists():
                raise
            _remove_tree(aside)
        sync_directory(self.directory.parent)

    def _take_free(self) -> str | None:
        while self._seen_free:
            name = self._seen_free.pop()
            if self._take(self._free / name):
                return name
        return None

    def _take(self, token: Path) -> bool:
        own = self._own / token.name
        return not own.exists() and self._rename(token, own)  # an old listing may show what is held here already

    def _dead(self) -> list[str]:
        """Other instances that hold something and have shown no life for the expiry."""
        others = [name for name in sorted(_names(self._held)) if name != self.instance and _names(self._held / name)]
        if not others:
            return []
        self.beat()
        now = _modified(self._alive)
        assert now is not None
        last = {name: _modified(self.directory / "alive" / name) for name in others}
        return [name for name, moment in last.items() if moment is None or now - moment > self._expiry]

    def _rename(self, token: Path, place: Path) -> bool:
        """Whether the token is at `place` now by this instance's doing."""
        with suppress(FileNotFoundError):
            os.rename(token, place)
            return True
        # NFS repeats a request whose answer was lost, and then finds the token gone. A place with the instance's name
        # in it is filled by nobody else.
        return self.instance in (place.parent.name, place.name.partition("@")[2]) and place.exists()

    def _keep_alive(self) -> None:
        while not self._stop.wait(self._expiry / HEARTBEATS):
            with suppress(OSError):  # a stall of the file system: the next beat tries again
                self.beat()


@dataclass(frozen=True, slots=True)
class LeaseCounts:
    """How the sub-batches of a shared run stand, seen from outside."""

    free: int
    held: dict[str, int]
    """By instance."""
    done: dict[str, int]
    """By the instance whose results count."""

    @classmethod
    def read(cls, directory: Path) -> "LeaseCounts":
        done = Counter(name.partition("@")[2] for name in _names(directory / "done"))
        held = {name: sum(map(str.isdigit, _names(directory / "held" / name))) for name in _names(directory / "held")}
        return cls(sum(map(str.isdigit, _names(directory / "free"))), held, dict(done))

    @property
    def instances(self) -> list[str]:
        return sorted(self.held, key=lambda name: (len(name), name))


def own_name(environment: Mapping[str, str] = os.environ) -> str:
    """A name for the instance that this process is: the task of its Slurm array, its Slurm job, or its host.

    It is the same when Slurm requeues the job, and when an array is submitted again.
    """
    return environment.get("SLURM_ARRAY_TASK_ID") or environment.get("SLURM_JOB_ID") or socket.gethostname()


def _name(sub_batch: int) -> str:
    return f"{sub_batch:06d}"


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _modified(path: Path) -> float | None:
    """Time of the last touch; opening makes NFS ask the server."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def _remove_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()
