"""Results of a run: from finished sequences to lines in the journal, and from there to the output files."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.journal import Journal, JournalError, Records
from hpcgen.batch.reader import BatchInput
from hpcgen.batch.request import Request, RequestError
from hpcgen.batch.response import error_line, output_line, unexecuted_line
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.batch.sub_batches import Counts, SubBatches, write_outputs
from hpcgen.durable import USER_FILE_MODE
from hpcgen.errors import HpcgenError
from hpcgen.sequence import Sequence


class OutputError(HpcgenError):
    """An output file cannot be written."""


def error_path(output: Path) -> Path:
    """Where the errors go, beside the output: results.jsonl and results.errors.jsonl."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def check_output_path(output: Path, kept: Iterable[Path] = ()) -> None:
    """Before any work: whether the output and the error file can be written at the end.

    Args:
        kept: files and directories that an output must not replace, such as the input.

    Raises:
        OutputError: one of them is no regular file or would replace what is kept, or its directory does not exist or
            is not writable.
    """
    if not output.parent.is_dir():
        raise OutputError(f"cannot write the output {output}: there is no directory {output.parent}")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write the output {output}: {output.parent} is not writable")
    for path in (output, error_path(output)):
        if path.is_dir():
            raise OutputError(f"the output {path} is a directory; give the name of a file")
        if path.exists() and not path.is_file():
            raise OutputError(f"the output {path} is not a regular file; an output takes its place in one step")
        for other in kept:
            if path.absolute() == other.absolute() or (path.exists() and other.exists() and path.samefile(other)):
                raise OutputError(f"the output {path} would replace {other}; give another --output")


def write_results(records: Records, output: str | Path, errors: str | Path | None = None) -> Counts:
    """As `Results.write_outputs`."""
    output = Path(output)
    errors = error_path(output) if errors is None else Path(errors)
    try:
        return write_outputs(records, slice(None), output, errors, empty_errors=True, mode=USER_FILE_MODE)
    except OSError as error:
        raise OutputError(f"cannot write the output {output} or {errors}: {error.strerror}") from None


class Results:
    """Takes finished sequences and failed requests; a request is finished when its line is durable in the journal.

    Args:
        run_directory: open; its journal is made or continued.
        batch_input: the input; a finished request is read from it again to answer it.
        detokenizer: of the model.
        sub_batch: requests of a sub-batch; None: no partial results.
        owns: whether a request is this process's to answer.
        claim: see SubBatches.
        sync_seconds: see Journal.

    Raises:
        JournalError: the journal cannot be opened.
    """

    def __init__(
        self,
        run_directory: RunDirectory,
        batch_input: BatchInput,
        detokenizer: Detokenizer,
        sub_batch: int | None = None,
        *,
        owns: Callable[[int], bool] = lambda request: True,
        claim: Callable[[int], bool] = lambda number: True,
        sync_seconds: float = 2.0,
    ) -> None:
        self._run_directory = run_directory
        self._input = batch_input
        self._detokenizer = detokenizer
        self._run_id = run_directory.manifest.id
        self._model = Path(run_directory.manifest.model.path).name
        self._owns = owns
        self._samples: dict[int, list[Sequence]] = {}
        self.journal = Journal(run_directory.journal_path, len(batch_input), sync_seconds)
        self.finished = int(np.count_nonzero(self.journal.offsets >= 0))
        """Requests whose record is durable."""
        self.failed = int(np.count_nonzero((self.journal.offsets >= 0) & ~self.journal.ok))
        """Those of them that ended in an error."""
        self.sub_batches: SubBatches | None = None
        if sub_batch is not None:
            self.sub_batches = SubBatches(self.journal, run_directory.sub_batches, sub_batch, claim)
            self.sub_batches.release_missing()

    @property
    def complete(self) -> bool:
        """Whether every request is finished, and durably so."""
        return self.finished == len(self._input)

    def is_wanted(self, request: int) -> bool:
        """Whether a request has to be worked on here; what is not, `Intake` skips."""
        return not self.journal.finished(request) and self._owns(request)

    def forget(self, requests: range) -> None:
        """Other instances answer these from now on."""
        for request in [request for request in self._samples if request in requests]:
            del self._samples[request]

    def take_over(self, sub_batch: int, records: Records) -> None:
        """Answers a sub-batch from now on, with what `records` of another instance have of it as far as it is whole.

        Raises:
            JournalError, OutputError: they cannot be written.
        """
        assert self.sub_batches is not None
        for request in self.sub_batches.part(sub_batch):
            if records.finished(request) and not self.journal.finished(request):
                try:
                    line = records.line(request)
                except JournalError:  # torn by what ended the other one: it is run again
                    continue
                self.journal.append(request, bool(records.ok[request]), line)
        self.sync(now=True)
        if self._owns(sub_batch * self.sub_batches.size) and self.sub_batches.is_finished(sub_batch):
            self._release(sub_batch)  # all of it was finished here in an earlier life

    def unassembled(self) -> Iterator[Sequence]:
        """Finished sequences whose request waits for other samples: a checkpoint must hold them."""
        for samples in self._samples.values():
            yield from samples

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended, by a stop, its length, or an error of its own. Its request may still wait for others.

        Raises:
            JournalError: the journal cannot be written.
        """
        if self.journal.finished(sequence.request):
            return  # another sample of the request has failed
        request = self._input.read(sequence.request)
        if isinstance(request, RequestError):
            raise OutputError(f"{self._input.path} has changed during the run: {request.message}")
        if sequence.error is not None:
            message = f"line {request.line}: {sequence.error}"
            self.fail(
                request.index,
                RequestError(
                    line=request.line, code="sequence_failed", message=message, custom_id=request.custom_id, status=500
                ),
            )
            return
        samples = self._samples.setdefault(request.index, [])
        samples.append(sequence)
        if len(samples) == request.body.samples:
            del self._samples[request.index]
            samples.sort(key=lambda sample: sample.sample)
            self._append(request, samples)

    def fail(self, request: int, error: RequestError) -> None:
        """A request has ended in an error; nothing happens if it is finished already.

        Raises:
            JournalError: the journal cannot be written.
        """
        if self.journal.finished(request):
            return
        self._samples.pop(request, None)
        self.journal.append(request, False, error_line(self._run_id, request, error))
        self.sync()

    def abandon(self, code: str, message: str) -> None:
        """Every request that is not finished ends unexecuted, with this error.

        Raises:
            JournalError: the journal cannot be written.
        """
        for request in np.flatnonzero(self.journal.offsets < 0).tolist():
            self._samples.pop(request, None)
            custom_id = self._input.read(request).custom_id
            self.journal.append(request, False, unexecuted_line(self._run_id, request, custom_id, code, message))
        self.sync(now=True)

    def sync(self, now: bool = False) -> int:
        """Make finished requests durable, if it is time or `now`, and release complete sub-batches; how many became so.

        Raises:
            JournalError, OutputError: they cannot be written.
            LockedError: another process has taken the run directory over.
        """
        self._run_directory.check_lock()
        durable = self.journal.sync(now)
        self.finished += len(durable)
        self.failed += int(np.count_nonzero(~self.journal.ok[durable]))
        if self.sub_batches is not None:
            for request in durable:
                if self.sub_batches.note(request):
                    self._release(request // self.sub_batches.size)
        return len(durable)

    def write_outputs(self, output: str | Path, errors: str | Path | None = None) -> Counts:
        """Write the lines of all finished requests, in the input's order, to the output or the error file.

        Args:
            output: takes its place in one step.
            errors: by default beside the output, see `error_path`.

        Raises:
            OutputError: a file cannot be written.
        """
        self.sync(now=True)
        return write_results(self.journal, output, errors)

    def close(self) -> None:
        self.journal.close()

    def _release(self, sub_batch: int) -> None:
        assert self.sub_batches is not None
        try:
            self.sub_batches.release(sub_batch)
        except OSError as error:
            raise OutputError(f"cannot write a sub-batch: {error}") from None

    def _append(self, request: Request, samples: list[Sequence]) -> None:
        line = output_line(self._run_id, request, samples, self._detokenizer, self._model, int(time.time()))
        self.journal.append(request.index, True, line)
        self.sync()
