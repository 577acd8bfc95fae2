"""A large file that is either there whole or not at all, whatever kills its writer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcgen.durable import sync_directory
from hpcgen.model.process_identity import is_dead, own_identity

PARTIAL_SUFFIX = ".partial"
ABANDONED_AFTER = 3600.0
"""Seconds without a write after which the partial file of another node's process counts as left behind."""


@contextmanager
def written_aside(destination: Path) -> Iterator[int]:
    """Yields a descriptor to write to; the file appears under its name when the block ends without an exception.

    Written under another name beside it, flushed to the disk, then renamed. Two processes may do this at once: each
    writes its own file, and the last rename stays. Partial files of dead processes are removed first.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(destination.parent)
    partial = destination.with_name(f".{own_identity()}@{destination.name}{PARTIAL_SUFFIX}")
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        try:
            yield descriptor
            os.fsync(descriptor)
            # What was just written lies in the page cache in small pages. Read again, it comes in as large ones as the
            # file system has, which a mapping of the file is faster with.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        os.replace(partial, destination)
    except BaseException:
        with suppress(FileNotFoundError):
            partial.unlink()
        raise
    sync_directory(destination.parent)


def remove_abandoned(directory: Path) -> None:
    """Removes the partial files that dead processes left in a directory."""
    for partial in directory.glob(f".*~*@*{PARTIAL_SUFFIX}"):
        dead = is_dead(partial.name[1:].partition("@")[0])
        with suppress(FileNotFoundError):
            if dead or (dead is None and age(partial) > ABANDONED_AFTER):
                partial.unlink()


def age(path: Path) -> float:
    """Seconds since the last change of a file, by the clock of the file system that it is on.

    Nodes and file servers disagree about the time; a file that is touched now tells what the server takes it to be.
    """
    probe = path.with_name(f".clock.{own_identity()}")
    probe.touch()
    now = probe.stat().st_mtime
    with suppress(FileNotFoundError):
        probe.unlink()
    return now - path.stat().st_mtime
