"""Batches as Slurm jobs: each one becomes a submitted run; this end only looks after them."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.results import error_path
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.batch.sub_batches import Counts
from hpcgen.durable import DIRECTORY_MODE
from hpcgen.errors import HpcgenError
from hpcgen.jobs import slurm
from hpcgen.jobs.job_options import SlurmOptions
from hpcgen.jobs.status import RunState, read_state
from hpcgen.jobs.submission import Submission, submissions, submit
from hpcgen.server.delivery import OpenBatch, RunSettings, fail, new_file_id, note_ending, record_outputs
from hpcgen.server.settings import Places
from hpcgen.server.store import Store, StoredBatch

POLL_SECONDS = 10.0
MOST_SUBMISSIONS = 3
"""Jobs that may fail before their batch does; preemptions are requeued by the job itself and do not count."""
_log = logging.getLogger(__name__)


class _Summary(msgspec.Struct):
    """As much of a run's success marker as is needed here."""

    requests_ok: int
    requests_failed: int


class SlurmRuns:
    """A thread that submits batches which are `in_progress`, and ends them as their runs end.

    Args:
        options: of each job.
        arguments: of `hpcgen run`, besides the model, the files and the run directory.
        load_detokenizer: asked for only when a batch ends early.
    """

    def __init__(
        self,
        store: Store,
        places: Places,
        settings: RunSettings,
        options: SlurmOptions,
        arguments: Sequence[str],
        load_detokenizer: Callable[[], Detokenizer],
        poll_seconds: float = POLL_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._places, self._settings = store, places, settings
        self._options, self._arguments, self._load_detokenizer = options, list(arguments), load_detokenizer
        self._poll_seconds, self._clock = poll_seconds, clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slurm-runs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Jobs go on; the next start finds them."""
        self._stop.set()
        self._thread.join()

    def turn(self) -> None:
        """Looks after every batch once."""
        for batch in self._store.batches_in("in_progress", "finalizing", "cancelling"):
            self._look_after_or_log(batch)

    def _run(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            self.turn()

    def _look_after_or_log(self, batch: StoredBatch) -> None:
        try:
            self._look_after(batch)
        except HpcgenError as error:  # Slurm does not answer, say: the next turn asks again
            _log.error("%s: %s", batch.id, error)
        except Exception:
            _log.exception("%s cannot be looked after", batch.id)

    def _look_after(self, batch: StoredBatch) -> None:
        run = self._places.run(batch.id)
        recorded = submissions(run) if run.exists() else []
        if batch.status == "cancelling":
            self._end_early(batch, "cancelled", recorded)
        elif not recorded:
            if self._clock() >= batch.expires_at or batch.ending == "expired":
                self._end_early(batch, "expired", recorded)
            else:
                self._submit(batch)
        else:
            self._follow(batch, recorded)

    def _follow(self, batch: StoredBatch, recorded: Sequence[Submission]) -> None:
        """A batch with jobs."""
        state = read_state(self._places.run(batch.id))
        self._store.update_batch(batch.id, ("in_progress",), completed=state.ok, failed=state.failed)
        if state.complete and batch.ending in (None, "completed"):
            self._deliver_complete(batch)
        elif self._clock() >= batch.expires_at or batch.ending == "expired":
            self._end_early(batch, "expired", recorded)
        elif not state.active and state.slurm_error is None:
            if len(recorded) < MOST_SUBMISSIONS:
                _log.error("%s: its job is over and the run is not complete; submitting it again", batch.id)
                self._submit(batch)
            else:
                _log.error("%s: failed, %s jobs ended without results; see %s", batch.id, len(recorded), state.path)
                fail(self._store, batch, "batch_failed", "The jobs of this batch failed; the operator can see why.")

    def _submit(self, batch: StoredBatch) -> None:
        run = self._places.run(batch.id)
        run.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        arguments = ["run", "--model", str(self._settings.model.absolute())]
        arguments += ["--input", str(self._places.input(batch.id).absolute())]
        arguments += ["--output", str(self._output(batch).absolute()), "--run-dir", str(run.absolute())]
        if self._settings.sub_batch is not None:
            arguments += ["--sub-batch", str(self._settings.sub_batch)]
        submission = submit(self._options, run, [*arguments, *self._arguments])
        _log.info("%s: job %s", batch.id, submission.job_id)

    def _deliver_complete(self, batch: StoredBatch) -> None:
        """The run has written the outputs: they get their second names as files of the API."""
        ending = note_ending(self._store, batch, "completed")
        if ending != "completed":  # cancelled this very moment
            return
        summary = msgspec.json.decode(RunDirectory(self._places.run(batch.id)).success_path.read_bytes(), type=_Summary)
        output, errors = new_file_id(), new_file_id()
        os.link(self._output(batch), self._places.file(output))
        os.link(error_path(self._output(batch)), self._places.file(errors))
        counts = Counts(summary.requests_ok, summary.requests_failed)
        record_outputs(self._store, self._places, batch, ending, output, errors, counts)

    def _end_early(self, batch: StoredBatch, ending: str, recorded: Sequence[Submission]) -> None:
        """Ends the jobs, and once they are over delivers what is finished."""
        if batch.status == "cancelling" and not batch.in_progress_at:
            self._store.update_batch(batch.id, ("cancelling",), status="cancelled", cancelled_at=int(self._clock()))
            return
        note_ending(self._store, batch, ending)
        if recorded:
            state = read_state(self._places.run(batch.id))
            if state.slurm_error is not None:
                raise slurm.SlurmError(state.slurm_error)
            if state.active:
                _cancel(state)
                return
        run = RunDirectory(self._places.run(batch.id))
        settings = self._settings
        if run.manifest_path.exists():  # what the job made of its options holds
            settings = replace(settings, options=run.read_manifest().options)
        OpenBatch(batch, self._places, settings, self._load_detokenizer()).deliver(self._store, self._places, ending)

    def _output(self, batch: StoredBatch) -> Path:
        return self._places.batch(batch.id) / "results.jsonl"


def _cancel(state: RunState) -> None:
    for job in {job.id.split("_")[0] for job in state.active}:
        slurm.cancel(job)
