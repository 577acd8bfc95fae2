"""A batch at work: its run directory while it runs, and its output files at the end."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.reader import BatchInput
from hpcgen.batch.results import Results
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.batch.sub_batches import Counts
from hpcgen.checkpoint.writer import Snapshot
from hpcgen.server import saved_sequences
from hpcgen.server.settings import Places
from hpcgen.server.store import Store, StoredBatch, StoredFile

UNEXECUTED = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}
"""Code and message of the requests that a batch's end leaves undone."""
UNFINISHED = ("in_progress", "finalizing", "cancelling")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What the run directories of all batches have in common."""

    model: Path
    options: Mapping[str, Any]
    """Those that decide the results, see RunDirectory.open."""
    sub_batch: int | None
    line_bytes: int


class OpenBatch:
    """A batch whose run directory this process holds.

    Raises:
        HpcgenError: the run directory cannot be opened, or is another run's.
    """

    def __init__(self, batch: StoredBatch, places: Places, settings: RunSettings, detokenizer: Detokenizer) -> None:
        self.batch = batch
        self.input = BatchInput(places.input(batch.id), settings.line_bytes)
        self._run_directory = RunDirectory(places.run(batch.id))
        self._run_directory.open(self.input, settings.model, settings.options)
        try:
            self.results = Results(self._run_directory, self.input, detokenizer, settings.sub_batch)
            found = saved_sequences.load(self._run_directory.checkpoints)
        except BaseException:
            self._run_directory.close()
            raise
        self.saved = [sequence for sequence in found if self.results.is_wanted(sequence.request)]
        """Sequences that an earlier server had begun; their requests must not come from the input again."""

    @property
    def events_path(self) -> Path:
        return self._run_directory.events_path

    def save(self, taken: Snapshot) -> None:
        """Raises CheckpointFailed."""
        saved_sequences.save(self._run_directory.checkpoints, taken)

    @property
    def counts(self) -> Counts:
        """Requests with a durable result, and with an error."""
        return Counts(self.results.finished - self.results.failed, self.results.failed)

    def close(self) -> None:
        """What is finished stays finished."""
        self.results.close()
        self._run_directory.close()
        self.input.close()

    def deliver(self, store: Store, places: Places, ending: str) -> None:
        """Ends the batch as 'completed', or with what is finished as 'expired' or 'cancelled', and closes it.

        A crash at any point repeats what was not done: the ending is in the store before anything else.
        """
        output, errors = new_file_id(), new_file_id()
        try:
            ending = note_ending(store, self.batch, ending)
            if ending != "completed":
                self.results.abandon(*UNEXECUTED[ending])
            counts = self.results.write_outputs(places.file(output), places.file(errors))
            saved_sequences.forget(self._run_directory.checkpoints)
            self._run_directory.mark_complete({"requests_ok": counts.completed, "requests_failed": counts.failed})
        finally:
            self.close()
        record_outputs(store, places, self.batch, ending, output, errors, counts)


def note_ending(store: Store, batch: StoredBatch, ending: str) -> str:
    """The batch is `finalizing` from now on, or is being cancelled; what it ends as: what was noted first."""
    store.update_batch(batch.id, ("in_progress",), status="finalizing", finalizing_at=int(time.time()), ending=ending)
    return store.any_batch(batch.id).ending or "cancelled"


def record_outputs(
    store: Store, places: Places, batch: StoredBatch, ending: str, output: str, errors: str, counts: Counts
) -> None:
    """The files are in their places: makes those that have lines the batch's outputs, and ends the batch."""
    now = int(time.time())
    files = []
    for id, count, kind in ((output, counts.completed, "output"), (errors, counts.failed, "error")):
        path = places.file(id)
        if count:
            files.append(_output_file(batch, id, f"{batch.id}_{kind}.jsonl", path.stat().st_size, count, now))
        else:
            path.unlink(missing_ok=True)
    store.deliver(
        batch.id,
        UNFINISHED,
        files,
        status=ending,
        completed=counts.completed,
        failed=counts.failed,
        output_file_id=output if counts.completed else None,
        error_file_id=errors if counts.failed else None,
        **{f"{ending}_at": now},
    )


def fail(store: Store, batch: StoredBatch, code: str, message: str) -> None:
    """Ends a batch that cannot be run."""
    error = {"code": code, "message": message, "param": None, "line": None}
    store.update_batch(batch.id, UNFINISHED, status="failed", failed_at=int(time.time()), errors=[error])


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def _output_file(batch: StoredBatch, id: str, name: str, size: int, lines: int, now: int) -> StoredFile:
    return StoredFile(
        id=id,
        owner=batch.owner,
        filename=name,
        purpose="batch_output",
        bytes=size,
        lines=lines,
        created_at=now,
        expires_at=None if batch.output_seconds is None else now + batch.output_seconds,
    )
