"""Files that are whole or absent after any crash: written aside, synced, renamed. For every room."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

FILE_MODE = 0o600
USER_FILE_MODE = 0o666
"""For files outside the run directory: the user's umask decides."""
DIRECTORY_MODE = 0o700


@contextmanager
def write_atomically(path: Path, mode: int = FILE_MODE) -> Iterator[BinaryIO]:
    """A file to write, that takes the place of `path` when the block ends; if it raises, `path` is as before.

    Raises:
        OSError: the directory is not writable, or is full.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(FileNotFoundError):
            aside.unlink()
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON."""
    with write_atomically(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def write_once(path: Path, value: Any) -> bool:
    """Make `path` from `value` as indented JSON unless somebody else makes it first; whether this call did.

    Of several processes, on NFS and Lustre too, one succeeds.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        os.link(aside, path)
    # NFS may report a link that it made as failed, when a reply was lost; the count of links tells the truth.
    made = aside.stat().st_nlink == 2
    aside.unlink()
    sync_directory(path.parent)
    return made


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a crash of the machine."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
