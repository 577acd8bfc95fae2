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
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from hpcgen.durable import sync_directory, write_json
from hpcgen.errors import HpcgenError

HEARTBEAT_SECONDS = 10.0
EXPIRY_SECONDS = 180.0
"""Clients of NFS may show another's touch a minute late, and a shared file system may stall for another."""
MERGE = "merge"
"""Token of the last work, which is done once, when all sub-batches are: writing the ordered output."""

_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class LeaseError(HpcgenError):
    """The lease directory cannot be used, or is of a run that was divided otherwise."""


class _Division(msgspec.Struct, frozen=True):
    """How the run is divided; the same for all instances."""

    sub_batches: int
    size: int


class Leases:
    """One instance's view. `open` it, `acquire`, `complete`; a thread shows that the instance lives until `close`.

    An instance that starts again under its name has what it held before, if nobody took it over meanwhile.
    """

    def __init__(self, directory: Path, instance: str, expiry: float = EXPIRY_SECONDS) -> None:
        """`instance`: unique among live ones, the same when the job is requeued; letters, digits, '.', '_', '-'."""
        if not _INSTANCE.fullmatch(instance):
            raise LeaseError(f"{instance!r} cannot be the name of an instance: use letters, digits, '.', '_' and '-'")
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
        self._division = _Division(0, 1)

    def open(self, sub_batches: int, size: int, heartbeat: float = HEARTBEAT_SECONDS) -> "Leases":
        """Makes the directory if no other instance has, and starts to show life.

        Args:
            sub_batches: of the run.
            size: requests of a sub-batch.
            heartbeat: seconds between signs of life.

        Raises:
            LeaseError: the run is divided otherwise, or the directory cannot be written.
        """
        wanted = _Division(sub_batches, size)
        try:
            if not self.directory.exists():
                self._create(wanted)
            self._division = msgspec.json.decode((self.directory / "division.json").read_bytes(), type=_Division)
            if self._division != wanted:
                raise LeaseError(
                    f"{self.directory} divides the run into {self._division.sub_batches} sub-batches of "
                    f"{self._division.size}, not {sub_batches} of {size}: give all instances the same --sub-batch"
                )
            self._own.mkdir(exist_ok=True)
            self.beat()
        except (OSError, msgspec.MsgspecError) as error:
            raise LeaseError(f"cannot use the leases in {self.directory}: {error}") from None
        self._thread = threading.Thread(target=self._keep_alive, args=(heartbeat,), name="leases", daemon=True)
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

    def acquire(self, count: int = 1) -> list[int]:
        """Takes up to `count` sub-batches: free ones, lowest first; then those of instances that have died.

        An empty list is not the end: others may hold what they will not finish. See `all_done`.
        """
        taken: list[int] = []
        for token in self._available():
            if len(taken) == count:
                break
            if self._rename(token, self._own / token.name):
                taken.append(int(token.name))
        return taken

    def complete(self, sub_batch: int) -> bool:
        """Marks it finished, once its results are durable. False: another instance has taken it over, drop them."""
        name = _name(sub_batch)
        finished = self._rename(self._own / name, self._done / f"{name}@{self.instance}")
        if finished:
            sync_directory(self._done)
        return finished

    def release(self, sub_batch: int) -> None:
        """Gives it back unfinished, as before leaving for long."""
        self._rename(self._own / _name(sub_batch), self._free / _name(sub_batch))

    @property
    def done(self) -> dict[int, str]:
        """Finished sub-batches, and the instance whose results count."""
        tokens = (name.partition("@") for name in _names(self._done))
        return {int(name): instance for name, _, instance in tokens if name.isdigit()}

    @property
    def all_done(self) -> bool:
        return len(self.done) == self._division.sub_batches

    def acquire_merge(self) -> bool:
        """Once all sub-batches are done: whether this instance is the one that merges the results."""
        if not self.all_done:
            return False
        own = self._own / MERGE
        if own.exists():
            return True
        candidates = [self._free / MERGE, *(self._held / name / MERGE for name in self._dead())]
        return any(self._rename(token, own) for token in candidates)

    def complete_merge(self) -> bool:
        """Marks the merge finished. False: another instance has taken it over."""
        return self._rename(self._own / MERGE, self._done / f"{MERGE}@{self.instance}")

    @property
    def merged(self) -> bool:
        return any(name.startswith(f"{MERGE}@") for name in _names(self._done))

    def _create(self, division: _Division) -> None:
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

    def _available(self) -> Iterator[Path]:
        for name in sorted(filter(str.isdigit, _names(self._free))):
            yield self._free / name
        for instance in self._dead():
            for name in sorted(filter(str.isdigit, _names(self._held / instance))):
                yield self._held / instance / name

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

    def _keep_alive(self, heartbeat: float) -> None:
        while not self._stop.wait(heartbeat):
            with suppress(OSError):  # a stall of the file system: the next beat tries again
                self.beat()


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
