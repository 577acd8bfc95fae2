"""The end of a run: the outputs in the input's order, then the success marker, and what came of it all."""

import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from hpcgen.batch.journal import Records
from hpcgen.batch.merged_journal import MergedJournal
from hpcgen.batch.parquet import is_parquet, write_parquet
from hpcgen.batch.results import OutputError, error_path, write_results
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.batch.source import Source
from hpcgen.batch.sub_batches import SubBatches
from hpcgen.engine.executor import Activity
from hpcgen.jobs.leases import Leases
from hpcgen.jobs.totals import CheckpointCost, token_totals
from hpcgen.report.clock import Clock
from hpcgen.report.events import job_spans, read_events
from hpcgen.report.summary import Summary
from hpcgen.scheduler.plan import Phase

POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where the results of a run go. Its methods take the activity of this job, for the summary."""

    output: Path
    source: Source
    run_directory: RunDirectory

    def deliver(self, records: Records, sub_batches: SubBatches | None, activity: Activity) -> Summary:
        """Of a run that is complete: outputs and success marker.

        Raises:
            OutputError: the outputs cannot be written.
            LockedError: another process has taken the run directory over.
        """
        errors = self._write(records)
        return self._declare(self._summary(records, sub_batches, activity, errors))

    def merge(
        self, leases: Leases, activity: Activity, check: Callable[[], None], say: Callable[[str], None]
    ) -> Summary | None:
        """Of a shared run: waits until it is complete. None for all instances but the one that delivers.

        Args:
            leases: those of this instance.
            check: called while waiting; may raise to end it.

        Raises:
            JournalError: an instance's journal has lost what it had.
            OutputError, LockedError: as `deliver`.
        """
        path, (requests, size) = self.run_directory.path, msgspec.structs.astuple(leases.division)
        while not self.run_directory.is_complete:
            check()
            if not leases.acquire_merge():
                time.sleep(POLL_SECONDS)
                continue
            journals = {n: RunDirectory(path, instance).journal_path for n, instance in leases.done.items()}
            with MergedJournal(requests, size, journals) as records:
                records.check_complete()
                sub_batches = SubBatches(records, self.run_directory.sub_batches, size)
                sub_batches.release_missing()  # of an instance that died in between
                summary = self._summary(records, sub_batches, activity, self._write(records))
                if leases.acquire_merge():  # still this one's
                    return self._declare(summary)
        say(f"the run in {path} is complete: its results are in {self.output}")
        return None

    def _write(self, records: Records) -> Path:
        """Results in the form that the output's name asks for. Returns where the errors are."""
        if not is_parquet(self.output):
            write_results(records, self.output)
            return error_path(self.output)
        try:
            write_parquet(records, self.source.table, self.output)
        except OSError as error:
            raise OutputError(f"cannot write the output {self.output}: {error.strerror}") from None
        return self.output

    def _summary(self, records: Records, sub_batches: SubBatches | None, activity: Activity, errors: Path) -> Summary:
        finished = records.offsets >= 0
        failed = int(np.count_nonzero(finished & ~records.ok))
        tokens = token_totals(records)
        event_files = [part.events_path for part in self.run_directory.parts()]
        streams = [list(read_events(file)) for file in event_files if file.exists()]
        clock, checkpoints = Clock.of(streams), CheckpointCost.read(event_files)
        times = sub_batches.completion_times() if sub_batches else []
        usage = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
        return Summary(
            requests_ok=int(np.count_nonzero(finished)) - failed,
            requests_failed=failed,
            prompt_tokens=tokens.prompt,
            output_tokens=tokens.output,
            bct=clock.seconds,
            prefill_seconds=activity.seconds[Phase.PREFILL],
            decode_seconds=activity.seconds[Phase.DECODE],
            peak_memory=sum(each.ru_maxrss for each in usage) * 1024,
            output=self.output,
            errors=errors,
            run_directory=self.run_directory.path,
            scts=[clock(moment) for moment in times if moment is not None],
            resumed=sum(max(len(job_spans(events)) - 1, 0) for events in streams),
            checkpoints=checkpoints.count,
            checkpoint_stall=checkpoints.stall,
        )

    def _declare(self, summary: Summary) -> Summary:
        for part in self.run_directory.parts():
            for file in part.checkpoints.glob("*"):  # what they held is in the results
                with suppress(OSError):
                    file.unlink()
        counts = {"requests_ok": summary.requests_ok, "requests_failed": summary.requests_failed}
        self.run_directory.mark_complete({**counts, "bct": summary.bct})
        return summary
