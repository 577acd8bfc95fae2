"""Sub-batches: results of each N consecutive requests, released together as soon as all of them are finished."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpcgen.batch.journal import Records
from hpcgen.durable import FILE_MODE, write_atomically


class Counts(NamedTuple):
    """Lines written to the two files."""

    completed: int
    failed: int


def write_outputs(
    journal: Records, part: slice, output: Path, errors: Path, *, empty_errors: bool, mode: int = FILE_MODE
) -> Counts:
    """Write the lines of the finished requests in `part` of the input, in its order, to `output` or `errors`.

    The error file takes its place first: who sees the output sees the errors of the same requests. Without
    `empty_errors` there is no error file if no request failed.

    Raises:
        OSError: a file cannot be written.
    """
    requests = np.arange(len(journal.offsets))[part]
    finished = requests[journal.offsets[part] >= 0]
    completed, failed = finished[journal.ok[finished]], finished[~journal.ok[finished]]
    if len(failed) or empty_errors:
        _write_lines(journal, failed, errors, mode)
    _write_lines(journal, completed, output, mode)
    return Counts(len(completed), len(failed))


def _write_lines(journal: Records, requests: np.ndarray, path: Path, mode: int) -> None:
    with write_atomically(path, mode) as file:
        for request in requests:
            file.write(journal.line(request) + b"\n")


class SubBatches:
    """Which sub-batches are complete, and their files `NNNNNN.jsonl` and `NNNNNN.errors.jsonl`.

    Args:
        journal: of the run; what it holds already counts.
        directory: where the files go.
        size: requests of a sub-batch; the last one may be smaller.
        claim: asked of each sub-batch that is complete here: whether these are the results that count.
    """

    def __init__(
        self, journal: Records, directory: Path, size: int, claim: Callable[[int], bool] = lambda number: True
    ) -> None:
        self._journal = journal
        self._directory = directory
        self._claim = claim
        self.size = size
        starts = np.arange(0, len(journal.offsets), size)
        unfinished = journal.offsets < 0
        self._unfinished = np.add.reduceat(unfinished, starts, dtype=np.int64) if len(starts) else np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._unfinished)

    def part(self, number: int) -> range:
        """Its requests."""
        return range(len(self._journal.offsets))[number * self.size : (number + 1) * self.size]

    def is_finished(self, number: int) -> bool:
        """Whether all of its requests have a durable record here."""
        return bool(self._unfinished[number] == 0)

    def path(self, number: int) -> Path:
        return self._directory / f"{number:06d}.jsonl"

    def release_missing(self) -> None:
        """Release what was complete when an earlier process ended before it could."""
        for number in np.flatnonzero(self._unfinished == 0).tolist():
            self.release(number)

    def note(self, request: int) -> bool:
        """A request's record has become durable; whether it was the last one of its sub-batch."""
        number = request // self.size
        self._unfinished[number] -= 1
        return self.is_finished(number)

    def release(self, number: int) -> None:
        """Release one that is complete, unless its results do not count or lie there already."""
        path, part = self.path(number), self.part(number)
        if self._claim(number) and not path.exists():
            errors = path.with_suffix(".errors.jsonl")
            write_outputs(self._journal, slice(part.start, part.stop), path, errors, empty_errors=False)

    def completion_times(self) -> list[float | None]:
        """Unix time at which each sub-batch was complete, None while it is not; SCT counts from the run's start."""
        return [
            float(self._journal.times[number * self.size : (number + 1) * self.size].max()) if not unfinished else None
            for number, unfinished in enumerate(self._unfinished.tolist())
        ]
