"""The manifest of an epoch: written last, it says that the epoch is complete and what belongs to it."""

import hashlib
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from hpcgen.durable import sync_directory, write_atomically

VERSION = 1
KEPT_EPOCHS = 2
"""The newest epoch, and the one before it for the case that the newest turns out to be damaged."""

_MANIFEST = re.compile(r"epoch-(\d{8})\.json")
_FILE = re.compile(r"\.?epoch-(\d{8})[.-].*")


class NodeFile(msgspec.Struct, frozen=True):
    """One node's part of an epoch."""

    name: str
    node: int
    size: int
    """Bytes."""
    digest: str
    """Of all datasets but the pages themselves, which have a checksum each; see `writer.digest`."""
    sequences: int
    pages: int
    """Pages of KV that were saved."""
    pages_left_out: int
    """Pages that were not, for want of time; they are recomputed."""


class Manifest(msgspec.Struct, frozen=True):
    epoch: int
    files: tuple[NodeFile, ...]
    created: float
    """Unix time."""
    version: int = VERSION
    void: tuple[tuple[int, int], ...] = ()
    """(request, sample) of sequences whose KV in these files may be another's: their pages changed hands meanwhile."""
    checksum: str = ""
    """Of all the rest."""

    def sealed(self) -> "Manifest":
        """With its checksum."""
        plain = msgspec.json.encode(msgspec.structs.replace(self, checksum=""))
        return msgspec.structs.replace(self, checksum=hashlib.blake2b(plain, digest_size=16).hexdigest())

    @property
    def pages(self) -> int:
        return sum(file.pages for file in self.files)


def manifest_path(directory: Path, epoch: int) -> Path:
    return directory / f"epoch-{epoch:08d}.json"


def node_path(directory: Path, epoch: int, node: int) -> Path:
    return directory / f"epoch-{epoch:08d}.node-{node:05d}.h5"


def epochs(directory: Path) -> list[int]:
    """Epochs that have a manifest, valid or not; newest first."""
    return sorted((int(m[1]) for p in _names(directory) if (m := _MANIFEST.fullmatch(p))), reverse=True)


def next_epoch(directory: Path) -> int:
    """An epoch above all that left a trace, finished or not."""
    return 1 + max((int(m[1]) for p in _names(directory) if (m := _FILE.fullmatch(p))), default=0)


def read_manifest(directory: Path, epoch: int) -> Manifest:
    """Raises OSError or msgspec.MsgspecError (bad JSON, bad fields, bad checksum)."""
    manifest = msgspec.json.decode(manifest_path(directory, epoch).read_bytes(), type=Manifest)
    if manifest.version == VERSION and manifest != manifest.sealed():
        raise msgspec.ValidationError("wrong checksum")
    return manifest


def commit(directory: Path, epoch: int, files: Iterable[NodeFile], void: Iterable[tuple[int, int]] = ()) -> Manifest:
    """Makes an epoch the newest, once all nodes' files are in place, and removes what it supersedes.

    One process calls this. Kept are KEPT_EPOCHS epochs and, where these have no pages, the newest that has: its KV
    still serves sequences that have grown since. `void`: see Manifest.

    Raises:
        OSError: the manifest could not be written; the epochs before are untouched.
    """
    by_node = tuple(sorted(files, key=lambda file: file.node))
    manifest = Manifest(epoch, by_node, time.time(), void=tuple(void)).sealed()
    sync_directory(directory)
    with write_atomically(manifest_path(directory, epoch)) as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    remove_superseded(directory)
    return manifest


def remove_superseded(directory: Path) -> None:
    """Removes epochs that are not kept, and what never became an epoch. Errors are ignored: it is tried again."""
    kept = epochs(directory)[:KEPT_EPOCHS]
    if not kept:
        return
    if not any(_has_pages(directory, epoch) for epoch in kept):
        kept += [epoch for epoch in epochs(directory)[KEPT_EPOCHS:] if _has_pages(directory, epoch)][:1]
    doomed = [name for name in _names(directory) if (m := _FILE.fullmatch(name)) and int(m[1]) not in kept]
    # A manifest goes before its files, so that none is ever without them.
    for name in sorted(doomed, key=lambda name: not name.endswith(".json")):
        newest = int(_FILE.fullmatch(name)[1]) > kept[0]  # type: ignore[index]
        if not newest:  # another node may be writing it now
            with suppress(OSError):
                (directory / name).unlink()


def _has_pages(directory: Path, epoch: int) -> bool:
    try:
        return read_manifest(directory, epoch).pages > 0
    except (OSError, msgspec.MsgspecError):
        return False


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []
