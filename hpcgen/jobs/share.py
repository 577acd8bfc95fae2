"""The requests of a run that one instance answers: all of them, or those of the sub-batches that it leases."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hpcgen.batch.intake import Intake
from hpcgen.batch.merged_journal import MergedJournal
from hpcgen.batch.results import Results
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.jobs.leases import Leases

LOOK_SECONDS = 10.0
"""Between two looks at whether other instances have taken over what is held here."""
RETRY_SECONDS = 2.0
"""Between two tries to lease something after there was nothing."""
FULL_BATCHES = 2
"""Sequences that an instance takes on, in batches that decode at once: one, and one to refill it from."""
SUB_BATCHES = 100
"""Into so many a shared run is divided where the user does not say."""
MOST_REQUESTS = 1000
"""Of a sub-batch of a shared run where the user does not say: a file for each, and lost work if an instance dies."""


class Share(Protocol):
    """What the loop of an instance asks. `owns` and `claim` are for its Results."""

    def owns(self, request: int) -> bool:
        """Whether this instance has to answer the request."""

    def claim(self, sub_batch: int) -> bool:
        """A sub-batch is finished, durably: whether its results are the ones that count."""

    def begin(self, results: Results) -> None:
        """Once, before all that follows."""

    def wait_for_work(self, check: Callable[[], None]) -> bool:
        """Whether there is anything to do, now or after some waiting. `check` may raise to end it."""

    def wants_more(self, sequences: int, batch: int) -> bool:
        """Whether the engine, which has so many unfinished sequences, should get more before it asks.

        Args:
            batch: sequences that it decodes at once.
        """

    def supply(self, intake: Intake) -> None:
        """Sees to it that requests are there before they are needed. Cheap."""

    def note_begun(self, request: int) -> None:
        """The engine gets it next."""

    def lost(self) -> list[range]:
        """Requests that are other instances' from now on. Cheap."""

    def inherited(self) -> list[tuple[Path, range]]:
        """Checkpoints of dead instances, and the requests that were taken over from them since the last call. Cheap."""

    @property
    def elsewhere(self) -> int:
        """Requests that other instances have finished, as far as is known. Cheap."""

    @property
    def over(self) -> bool:
        """With nothing left to work on: whether nothing will come."""

    def leave(self) -> None:
        """The instance stops, perhaps for long, and has saved what it had begun."""


class WholeInput:
    """A run that is this process's alone."""

    elsewhere = 0
    over = True

    def __init__(self, requests: int) -> None:
        self._unread = range(requests)

    def owns(self, request: int) -> bool:
        return True

    def claim(self, sub_batch: int) -> bool:
        return True

    def begin(self, results: Results) -> None:
        self._results = results

    def wait_for_work(self, check: Callable[[], None]) -> bool:
        return not self._results.complete

    def wants_more(self, sequences: int, batch: int) -> bool:
        return True

    def supply(self, intake: Intake) -> None:
        if self._unread:
            intake.add(self._unread)
            self._unread = range(0)

    def note_begun(self, request: int) -> None:
        pass

    def lost(self) -> list[range]:
        return []

    def inherited(self) -> list[tuple[Path, range]]:
        return []

    def leave(self) -> None:
        pass


class LeasedShare:
    """A part of a shared run that changes as sub-batches are leased and finished.

    It takes on what fills the batch, and holds `ahead` sub-batches more, so that the batch stays full while the last
    sequences of a sub-batch come to their end.
    """

    def __init__(
        self,
        leases: Leases,
        run_directory: RunDirectory,
        ahead: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`leases`: open, of the instance that has opened the run directory."""
        self.leases, self._run_directory, self._ahead, self._clock = leases, run_directory, ahead, clock
        self._requests, self._size = leases.division.requests, leases.division.size
        self._held = set(leases.held)
        self._begun = set(self._held)
        """Of those held: what was held before has a journal, perhaps a checkpoint too."""
        self._unread = deque(sorted(self._held))
        self._next_try = self._next_look = 0.0
        self._elsewhere = 0
        self._inherited: list[tuple[Path, range]] = []

    def owns(self, request: int) -> bool:
        return request // self._size in self._held

    def claim(self, sub_batch: int) -> bool:
        self._held.discard(sub_batch)
        self._begun.discard(sub_batch)
        return self.leases.complete(sub_batch)

    def begin(self, results: Results) -> None:
        """What is marked as finished here and is not in the journal, which was damaged, is taken back."""
        assert results.sub_batches is not None
        self._results, self._sub_batches = results, results.sub_batches
        for sub_batch, instance in self.leases.done.items():
            if instance == self.leases.instance and not self._sub_batches.is_finished(sub_batch):
                self._sub_batches.path(sub_batch).unlink(missing_ok=True)
                self.leases.reopen(sub_batch)
                self._held.add(sub_batch)
                self._begun.add(sub_batch)
                self._unread.append(sub_batch)

    def wait_for_work(self, check: Callable[[], None]) -> bool:
        while not self._held:
            check()
            if self.leases.all_done:
                return False
            if not self._acquire():
                time.sleep(RETRY_SECONDS / 4)
        return True

    def wants_more(self, sequences: int, batch: int) -> bool:
        """An engine prefills as much as its host store holds: the others, and those that come later, would get none."""
        return sequences < FULL_BATCHES * batch

    def supply(self, intake: Intake) -> None:
        while len(self._held) - len(self._begun) < self._ahead and self._acquire():
            pass
        while self._unread:
            intake.add(self._sub_batches.part(self._unread.popleft()))

    def note_begun(self, request: int) -> None:
        sub_batch = request // self._size
        if sub_batch in self._held:
            self._begun.add(sub_batch)

    def lost(self) -> list[range]:
        now = self._clock()
        if now < self._next_look:
            return []
        self._next_look = now + LOOK_SECONDS
        gone = self._held.difference(self.leases.held)
        self._held -= gone
        self._begun -= gone
        self._count_elsewhere()
        return [self._sub_batches.part(sub_batch) for sub_batch in gone]

    def inherited(self) -> list[tuple[Path, range]]:
        inherited, self._inherited = self._inherited, []
        return inherited

    @property
    def elsewhere(self) -> int:
        return self._elsewhere

    @property
    def over(self) -> bool:
        self._count_elsewhere()
        return not self._held and self.leases.all_done

    def leave(self) -> None:
        """Gives back what was not begun; the rest waits for this instance until the leases expire."""
        for sub_batch in sorted(self._held - self._begun):
            self.leases.release(sub_batch)

    def _count_elsewhere(self) -> None:
        own = self.leases.instance
        done = self.leases.done.items()
        self._elsewhere = sum(len(self._sub_batches.part(number)) for number, instance in done if instance != own)

    def _acquire(self) -> bool:
        if self._clock() < self._next_try:
            return False
        lease = self.leases.acquire()
        if lease is None:
            self._next_try = self._clock() + RETRY_SECONDS
            return False
        self._held.add(lease.sub_batch)
        self._unread.append(lease.sub_batch)
        journals = {}
        if lease.before is not None:
            dead = RunDirectory(self._run_directory.path, lease.before)
            journals = {lease.sub_batch: dead.journal_path} if dead.journal_path.exists() else {}
            self._inherited.append((dead.checkpoints, self._sub_batches.part(lease.sub_batch)))
        with MergedJournal(self._requests, self._size, journals) as records:
            self._results.take_over(lease.sub_batch, records)
        return True


def default_sub_batch(requests: int) -> int:
    """Requests of a sub-batch of a shared run. All instances come to the same number."""
    return max(1, min(-(-requests // SUB_BATCHES), MOST_REQUESTS))
