"""The file system of the run directory: rename, fsync, speed, clock."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from hpcgen.jobs.doctor.check import Check, Level

SYNC_SECONDS = 0.1
"""An fsync that takes longer slows the journal down, which makes one every two seconds."""
SKEW_SECONDS = 5.0
"""Clocks further apart confuse leases, whose heartbeats are times of files."""
WRITE_BYTES = 64 * 2**20
ROOM_BYTES = 5 * 2**30
SLOW_WRITE = 50e6
"""Bytes/s below which checkpoints of gigabytes outlast a usual grace time."""


def run_directory(directory: Path) -> list[Check]:
    """What the journal, checkpoints and leases ask of a file system: rename over, fsync, speed, its clock."""
    name = "run directory"
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".hpcgen-doctor-") as scratch:
            place = Path(scratch)
            return [_rename(place), _link(place), _sync(place), _speed(place), room(place), clock_skew(place)]
    except OSError as error:
        remedy = "give the directory that runs will write to: hpcgen doctor DIR"
        return [Check(name, Level.ERROR, f"cannot write to {directory}: {error.strerror}", remedy)]


def _rename(place: Path) -> Check:
    old, new = place / "old", place / "new"
    old.write_text("old")
    new.write_text("new")
    os.replace(new, old)
    if old.read_text() == "new" and not new.exists():
        return Check("rename", Level.OK, "replaces a file in one step")
    remedy = "use another file system for run directories: results and leases rely on it"
    return Check("rename", Level.ERROR, "does not replace a file in one step", remedy)


def _link(place: Path) -> Check:
    """Locks are links, as those are made in one step on NFS and Lustre too."""
    (place / "one").write_text("x")
    try:
        os.link(place / "one", place / "two")
    except OSError as error:
        remedy = "locks of run directories are hard links: use another file system, not a bucket or a FUSE mount"
        return Check("hard links", Level.ERROR, f"cannot be made: {error.strerror}", remedy)
    return Check("hard links", Level.OK, "can be made")


def _sync(place: Path) -> Check:
    times = []
    with open(place / "sync", "wb") as file:
        for _ in range(5):
            file.write(bytes(4096))
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    seconds = median(times)
    if seconds <= SYNC_SECONDS:
        return Check("fsync", Level.OK, f"{seconds * 1e3:.1f} ms")
    remedy = "the journal writes every 2 s and will wait for it; prefer a scratch file system over a home directory"
    return Check("fsync", Level.WARNING, f"{seconds * 1e3:.0f} ms", remedy)


def _speed(place: Path, size: int = WRITE_BYTES) -> Check:
    data = os.urandom(2**20)
    start = time.perf_counter()
    with open(place / "speed", "wb") as file:
        for _ in range(size // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    rate = size / (time.perf_counter() - start)
    finding = f"{rate / 1e6:,.0f} MB/s for {size / 2**20:.0f} MiB and an fsync"
    if rate >= SLOW_WRITE:
        return Check("write speed", Level.OK, finding)
    remedy = "checkpoints on a stop signal will hold less KV, and resumed runs prefill again; use a faster file system"
    return Check("write speed", Level.WARNING, finding, remedy)


def room(place: Path, free: int | None = None) -> Check:
    """Space for the journal, the outputs and two checkpoints; `free` in bytes."""
    free = shutil.disk_usage(place).free if free is None else free
    finding = f"{free / 2**30:,.1f} GiB free"
    if free >= ROOM_BYTES:
        return Check("space", Level.OK, finding)
    remedy = "results are written twice (journal and output), and checkpoints hold KV: free space, or use another place"
    return Check("space", Level.WARNING, finding, remedy)


def weight_cache(cache: Path | None = None) -> Check:
    """Converted weights lie in the cache, as large as the model."""
    from hpcgen.model.weight_cache import cache_directory

    name, cache = "weight cache", cache or cache_directory()
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    remedy = "set HPCGEN_CACHE to a directory on fast storage that all nodes see, with room for the model's weights"
    if not os.access(existing, os.W_OK | os.X_OK) or not existing.is_dir():
        return Check(name, Level.ERROR, f"{cache} cannot be written", remedy)
    finding = f"{cache}, {shutil.disk_usage(existing).free / 2**30:,.1f} GiB free"
    if shutil.disk_usage(existing).free < ROOM_BYTES:
        return Check(name, Level.WARNING, finding, remedy)
    return Check(name, Level.OK, finding)


def clock_skew(place: Path, now: Callable[[], float] = time.time) -> Check:
    """This node's clock against that of the file system's server, which stamps the files of all nodes."""
    probe = place / "clock"
    before = now()
    probe.touch()
    stamped = probe.stat().st_mtime
    after = now()
    skew = max(before - stamped, stamped - after, 0.0)
    finding = f"{skew:.1f} s between this machine and the file system"
    if skew <= SKEW_SECONDS:
        return Check("clock", Level.OK, finding)
    remedy = "let chrony or ntpd set the clocks of all nodes; instances could take each other's leases for expired"
    return Check("clock", Level.WARNING, finding, remedy)
