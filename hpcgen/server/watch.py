"""A watched directory: files that appear in it become batches, and their results appear beside them.

    in/NAME.jsonl                put here by rename, so that it is whole
    accepted/BATCH/NAME.jsonl    taken; what is in here is not finished
    out/NAME/000000.jsonl        results of a sub-batch, as soon as it is finished
    out/NAME.jsonl, out/NAME.errors.jsonl    all results, in order

Everything appears by rename, whole. For schedulers that poll a directory and have no use for HTTP.
"""

import logging
import os
import secrets
import shutil
import threading
import time
from pathlib import Path

import msgspec

from hpcgen.batch.request import CHAT, URLS
from hpcgen.batch.results import error_path
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.durable import DIRECTORY_MODE, write_atomically
from hpcgen.server.access import Access, Server
from hpcgen.server.api_errors import ApiError
from hpcgen.server.batches_api import admit, new_batch
from hpcgen.server.delivery import new_file_id
from hpcgen.server.errors import ServerError
from hpcgen.server.store import OPEN, StoredBatch, StoredFile

OWNER = "watched directory"
SUFFIX = ".jsonl"
_HEAD_BYTES = 2**20
_log = logging.getLogger(__name__)


class _Head(msgspec.Struct):
    url: str


class WatchedDirectory:
    """A thread that looks into the directory at an interval.

    Raises:
        ServerError: the directory cannot be made.
    """

    def __init__(self, path: Path, server: Server, window: str = "7d", interval: float = 1.0) -> None:
        """`window`: completion window of its batches."""
        self._access, self._window, self._interval = Access(server, OWNER), window, interval
        self._in, self._accepted, self._out = path / "in", path / "accepted", path / "out"
        try:
            for directory in (path, self._in, self._accepted, self._out):
                directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise ServerError(f"cannot watch {path}: {error.strerror}") from None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watched-directory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def turn(self) -> None:
        """Takes what is new, as far as the server has room, and publishes what is finished."""
        for directory in sorted(self._accepted.iterdir()):
            self._continue(directory)
        for path in sorted(self._in.glob(f"*{SUFFIX}"), key=lambda path: (path.stat().st_mtime, path.name)):
            if path.name.startswith(".") or not path.is_file() or path.is_symlink():
                continue
            if not self._take(path):
                return

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._turn_or_log()

    def _turn_or_log(self) -> None:
        try:
            self.turn()
        except Exception:  # a full disk, say: it may get better
            _log.exception("the watched directory cannot be used")

    def _take(self, path: Path) -> bool:
        """Whether there was room for the batch; without, the file stays where it is."""
        with path.open("rb") as file:
            lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_HEAD_BYTES), b""))
        stored = StoredFile(
            id=new_file_id(),
            owner=OWNER,
            filename=path.name,
            purpose="batch",
            bytes=path.stat().st_size,
            lines=lines,
            created_at=int(time.time()),
        )
        batch = new_batch(OWNER, stored, _endpoint(path), self._window)
        file_path = self._access.server.places.file(stored.id)
        _link(path, file_path)
        self._access.store.add_file(stored)
        directory = self._accepted / batch.id
        directory.mkdir(mode=DIRECTORY_MODE)
        try:
            admit(self._access, batch)
        except ApiError:
            directory.rmdir()
            self._access.store.delete_file(OWNER, stored.id)
            file_path.unlink()
            return False
        os.rename(path, directory / path.name)
        return True

    def _continue(self, directory: Path) -> None:
        """An accepted batch, as far as it is."""
        batch = self._access.store.batch(OWNER, directory.name)
        names = [path.name for path in directory.iterdir()]
        if batch is None or not names:
            # The server was killed while it took the file.
            if batch is None:
                directory.rmdir()
            else:
                self._find_source(batch, directory)
            return
        output = self._out / names[0]
        self._publish_sub_batches(batch, output.with_suffix(""))
        if batch.status not in OPEN:
            self._publish(batch, output)
            shutil.rmtree(directory)

    def _find_source(self, batch: StoredBatch, directory: Path) -> None:
        """The batch is durable, its file was not moved yet: the two share the name that the store knows."""
        stored = self._access.store.file(OWNER, batch.input_file_id)
        name = stored.filename if stored is not None else f"{batch.id}{SUFFIX}"
        if (self._in / name).exists():
            os.rename(self._in / name, directory / name)
        else:
            (directory / name).touch(0o600)

    def _publish_sub_batches(self, batch: StoredBatch, place: Path) -> None:
        source = RunDirectory(self._access.server.places.run(batch.id)).sub_batches
        for path in sorted(source.glob(f"*{SUFFIX}")) if source.exists() else ():
            if not path.name.startswith(".") and not (place / path.name).exists():
                place.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
                _link(path, place / path.name)

    def _publish(self, batch: StoredBatch, output: Path) -> None:
        """The error file first: who sees the output sees the errors."""
        places = self._access.server.places
        if batch.errors:
            with write_atomically(error_path(output)) as file:
                for error in batch.errors:
                    file.write(msgspec.json.encode(error) + b"\n")
        for id, place in ((batch.error_file_id, error_path(output)), (batch.output_file_id, output)):
            if id is not None and places.file(id).exists():  # else published before a crash
                _link(places.file(id), place)
        for id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            if id is not None and self._access.store.delete_file(OWNER, id):
                places.file(id).unlink(missing_ok=True)


def _endpoint(path: Path) -> str:
    """That of the first request."""
    with path.open("rb") as file:
        first = file.readline(_HEAD_BYTES)
    try:
        url = msgspec.json.decode(first, type=_Head).url
    except (msgspec.DecodeError, UnicodeDecodeError):
        return CHAT
    return url if url in URLS else CHAT


def _link(source: Path, place: Path) -> None:
    """`place` is the file `source`, at once and whole; a copy where they are on two file systems."""
    aside = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    try:
        os.link(source, aside)
    except OSError:
        with source.open("rb") as original, write_atomically(place) as copy:
            shutil.copyfileobj(original, copy, 2**20)
        return
    os.replace(aside, place)
    aside.unlink(missing_ok=True)  # rename does nothing where both are the same file already
