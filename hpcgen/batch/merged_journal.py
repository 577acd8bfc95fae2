"""The journals of the instances that share a run, read as one."""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hpcgen.batch.journal import JournalError, Records, locate


class MergedJournal(Records):
    """Finished requests of some sub-batches, each from the journal that counts for it. Nothing is written.

    Args:
        requests: number of requests of the input.
        size: requests of a sub-batch.
        journals: sub-batch -> path; others may still write to them. A sub-batch that is not named has no records here.

    Raises:
        JournalError: a file is no journal of this input, or cannot be read.
    """

    def __init__(self, requests: int, size: int, journals: Mapping[int, Path]) -> None:
        super().__init__(requests)
        self._journals, self._size = journals, size
        self._descriptors: dict[Path, int] = {}
        parts: dict[Path, set[int]] = defaultdict(set)
        for sub_batch, path in journals.items():
            parts[path].add(sub_batch)
        for path, sub_batches in parts.items():
            for request, ok, finished, offset in locate(path):
                if request < requests and request // size in sub_batches:
                    self._note(request, ok, finished, offset)
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise JournalError(f"cannot read the journal {path}: {error.strerror}") from None

    def __enter__(self) -> "MergedJournal":
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def check_complete(self) -> None:
        """Raises JournalError where a request of a sub-batch that is named has no record."""
        named = np.isin(np.arange(len(self.offsets)) // self._size, list(self._journals))
        missing = np.flatnonzero(named & (self.offsets < 0))
        if len(missing):
            request = int(missing[0])
            raise JournalError(
                f"{self._journals[request // self._size]} has no record of {len(missing):,} requests that were "
                f"finished, the first in line {request + 1}: run that instance again, it makes them anew"
            )

    def _file(self, request: int) -> tuple[int, Path]:
        path = self._journals[request // self._size]
        return self._descriptors[path], path
