"""The run directory: everything about a run, on shared storage, and the refusal to mix two runs.

A run is one process's alone, or instances share it. Each of these has a part of its own, with its lock, journal, events
and checkpoints, in `instances/NAME`; the manifest, the leases, the outputs and the success marker are everybody's.
"""

import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcgen.batch.fingerprint import model_fingerprint
from hpcgen.batch.lock import DirectoryLock
from hpcgen.batch.reader import BatchInput
from hpcgen.durable import DIRECTORY_MODE, write_json, write_once
from hpcgen.errors import HpcgenError

FORMAT = 1
_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class RunDirectoryError(HpcgenError):
    """The run directory cannot be made, or belongs to another run."""


class InputIdentity(msgspec.Struct, frozen=True):
    path: str
    size: int
    sha256: str
    requests: int


class ModelIdentity(msgspec.Struct, frozen=True):
    path: str
    fingerprint: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is: written once, compared at every start after."""

    format: int = FORMAT
    id: str
    """Random, so that ids in the outputs of different runs differ."""
    created: float
    """Unix time."""
    input: InputIdentity
    model: ModelIdentity
    options: dict[str, Any]
    """The options that decide the results: seed, max_model_len, dtype, sub_batch and the like."""
    shared: bool = False
    """Whether instances share the run."""


class RunDirectory:
    """Paths and manifest of a run. `open` makes or continues it, and holds the lock of `own` until `close`.

    Looking at a run, as `hpcgen status` does, needs no lock: the paths, `read_manifest` and `is_complete` are enough.
    """

    def __init__(self, path: str | Path, instance: str | None = None) -> None:
        """`instance`: name of the one that works here, where several share the run. Raises RunDirectoryError."""
        if instance is not None and not _INSTANCE.fullmatch(instance):
            raise RunDirectoryError(
                f"{instance!r} cannot be the name of an instance: use letters, digits, '.', '_' and '-'"
            )
        self.path = Path(path)
        self.instance = instance
        self.own = self.path if instance is None else self.path / "instances" / instance
        """What the process that opens it writes alone."""
        self.manifest_path = self.path / "manifest.json"
        self.journal_path = self.own / "journal"
        self.events_path = self.own / "events.jsonl"
        self.plan_path = self.own / "plan.json"
        self.checkpoints = self.own / "checkpoints"
        self.leases = self.path / "leases"
        self.outputs = self.path / "outputs"
        self.sub_batches = self.outputs / "sub_batches"
        self.success_path = self.path / "SUCCESS"
        self._lock: DirectoryLock | None = None
        self._manifest: Manifest | None = None

    def parts(self) -> list["RunDirectory"]:
        """The run as each process that works, or worked, on it has it: itself, or one for each instance."""
        names = sorted(path.name for path in (self.path / "instances").glob("[!.]*"))
        return [RunDirectory(self.path, name) for name in names] or [RunDirectory(self.path)]

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = self.read_manifest()
        return self._manifest

    def open(self, batch_input: BatchInput, model_directory: str | Path, options: Mapping[str, Any]) -> "RunDirectory":
        """Make the directory, or continue in it if it is of the same run.

        Args:
            batch_input: the input; its size and SHA-256 are compared.
            model_directory: compared by `model_fingerprint`.
            options: those that decide the results; JSON types. They are compared one by one.

        Raises:
            RunDirectoryError: it cannot be made or written, or is of another input, model or options.
            LockedError: another live process works in it.
            ModelDirectoryError: the model directory is none.
        """
        identity = ModelIdentity(str(Path(model_directory).resolve()), model_fingerprint(model_directory))
        try:
            for directory in (self.path, self.own, self.checkpoints, self.outputs, self.sub_batches):
                directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            self._lock = DirectoryLock(self.own)
        except OSError as error:
            raise RunDirectoryError(f"cannot write the run directory {self.path}: {error.strerror}") from None
        try:
            for leftover in self.own.rglob(".*.part"):  # files that a killed process was writing
                if leftover.parent != self.checkpoints:  # there they tell of a checkpoint that was not finished
                    leftover.unlink()
            self._continue_or_begin(batch_input, identity, dict(options))
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Let other processes work in the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check_lock(self) -> None:
        """Raises:
        LockedError: another process has taken the directory over.
        """
        if self._lock is not None:
            self._lock.check()

    def read_manifest(self) -> Manifest:
        """Raises:
        RunDirectoryError: there is none, or it cannot be read.
        """
        try:
            manifest = msgspec.json.decode(self.manifest_path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{self.path} is not a run directory: it has no {self.manifest_path.name}"
            ) from None
        except (OSError, msgspec.DecodeError) as error:
            raise RunDirectoryError(f"cannot read {self.manifest_path}: {error}") from None
        if manifest.format != FORMAT:
            raise RunDirectoryError(
                f"{self.path} was made by another version of hpcgen (format {manifest.format}, this one has {FORMAT}); "
                "use a new --run-dir"
            )
        return manifest

    @property
    def is_complete(self) -> bool:
        """Whether every request is finished and the outputs are written."""
        return self.success_path.exists()

    def mark_complete(self, summary: Mapping[str, Any]) -> None:
        """Place the success marker, with a summary for whoever looks."""
        self.check_lock()
        write_json(self.success_path, dict(summary))

    def _continue_or_begin(self, batch_input: BatchInput, model: ModelIdentity, options: dict[str, Any]) -> None:
        given = InputIdentity(str(batch_input.path.resolve()), batch_input.size, batch_input.sha256, len(batch_input))
        if not self.manifest_path.exists():
            if self.journal_path.exists():
                raise RunDirectoryError(f"{self.own} has a journal but no manifest; use a new --run-dir")
            manifest = Manifest(
                id=secrets.token_hex(8), created=time.time(), input=given, model=model, options=options,
                shared=self.instance is not None,
            )  # fmt: skip
            if write_once(self.manifest_path, manifest):
                self._manifest = manifest
                return
        manifest = self.read_manifest()
        if manifest.shared and self.instance is None:
            raise RunDirectoryError(
                f"instances share the run in {self.path}: join them with --instance NAME, or use a new --run-dir"
            )
        if self.instance is not None and not manifest.shared:
            raise RunDirectoryError(
                f"the run in {self.path} was begun by one job alone: continue it without instances, "
                "or use a new --run-dir"
            )
        differences = []
        if manifest.input.sha256 != given.sha256:
            differences.append(
                f"the input {given.path} ({given.requests} lines, {given.size} bytes) is not the one it was begun "
                f"with, {manifest.input.path} ({manifest.input.requests} lines, {manifest.input.size} bytes)"
            )
        if manifest.model.fingerprint != model.fingerprint:
            differences.append(
                f"the model in {model.path} is not the one it was begun with, from {manifest.model.path}"
            )
        differences.extend(
            f"{name} is {options.get(name)!r}, but was {manifest.options.get(name)!r}"
            for name in sorted(manifest.options.keys() | options.keys())
            if manifest.options.get(name) != options.get(name)
        )
        if differences:
            raise RunDirectoryError(
                f"cannot continue the run in {self.path}: {'; '.join(differences)}. "
                "Give the same as before, or use a new --run-dir"
            )
        self._manifest = manifest
