"""The pool of a local server: the requests of all batches share one engine, so that a small one need not wait for a
large one and expert batches stay full."""

import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.intake import Intake, IntakeItem, TokenizerPool
from hpcgen.checkpoint.periodic import CheckpointSchedule
from hpcgen.checkpoint.writer import CheckpointFailed, Snapshot
from hpcgen.cluster.coordinator import Coordinator
from hpcgen.engine.engine import Engine
from hpcgen.errors import HpcgenError
from hpcgen.sequence import Sequence, Status
from hpcgen.server import saved_sequences
from hpcgen.server.delivery import OpenBatch, RunSettings, fail
from hpcgen.server.pool_events import PoolEvents
from hpcgen.server.settings import Places
from hpcgen.server.store import EngineState, Store

POLL_SECONDS = 0.5
"""Between two looks at the store, for new, cancelled and expired batches."""
FILE_THREADS = 4
_log = logging.getLogger(__name__)


@dataclass
class _Active:
    """A batch of which sequences may be in the engine."""

    opened: OpenBatch
    intake: Intake
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """Those in the engine, by id."""
    saved: list[Sequence] = field(default_factory=list)
    """Begun by an earlier server, for the engine as soon as it has room; the oldest last."""


class Pool:
    """Runs the batches of a store that are `in_progress`, and ends them. Call `turn` for ever, and `close`."""

    def __init__(
        self,
        engine: Engine | Coordinator,
        store: Store,
        places: Places,
        settings: RunSettings,
        detokenizer: Detokenizer,
        tokenizers: TokenizerPool,
        wave: int,
        clock: Callable[[], float] = time.time,
        events: PoolEvents | None = None,
        checkpoint_interval: float = 0.0,
    ) -> None:
        """
        Args:
            wave: tokens to keep ahead of the engine.
            clock: Unix time, as in the store.
            checkpoint_interval: seconds between two times that the unfinished sequences are saved; 0: only at the end.
        """
        self._engine, self._store, self._places = engine, store, places
        self._settings, self._detokenizer, self._tokenizers = settings, detokenizer, tokenizers
        self._wave, self._clock = wave, clock
        self._events = events or PoolEvents()
        self._schedule = CheckpointSchedule(checkpoint_interval, clock)
        self._saving: list[Future[None]] = []
        self._active: dict[str, _Active] = {}
        self._opening: dict[str, Future[OpenBatch]] = {}
        self._delivering: dict[str, Future[None]] = {}
        self._batch_of: dict[int, str] = {}
        """Of each sequence in the engine."""
        self._next_id = 0
        self._next_poll = 0.0
        # Large inputs and outputs take seconds to read and write: neither engine nor small batches may wait for them.
        self._files = ThreadPoolExecutor(FILE_THREADS, "batch-files")

    def turn(self) -> bool:
        """One decision of the engine, and what follows from it. False if there was nothing to do."""
        if self._clock() >= self._next_poll:
            try:
                self._poll()
            except sqlite3.OperationalError as error:  # its disk is full, say: the engine can go on meanwhile
                _log.error("the state of the server cannot be used: %s", error)
            self._next_poll = self._clock() + POLL_SECONDS
        self._take_opened()
        self._feed()
        if not self._engine.pending:
            self._end_complete()
            self._events.resting()
            return False
        self._save_if_due()
        for sequence in self._engine.step():
            self._finish(sequence)
        self._events.load(self._engine.load, self._engine.activity.migrated)
        for active in self._active.values():
            active.opened.results.sync()
        self._end_complete()
        return True

    def close(self) -> None:
        """Leaves batches as they are: what is finished is durable, what is begun is saved for the next start."""
        self._files.shutdown(wait=True)
        for id, active in self._active.items():
            active.intake.close()
            if (taken := self._snapshot(active)) is not None:
                self._save(id, active, taken)
            self._events.close(id, "stopped")
            active.opened.close()
        for future in self._opening.values():
            if future.exception() is None:
                future.result().close()
        self._tokenizers.close()

    def _poll(self) -> None:
        """Looks at the store, and tells it how things stand."""
        self._take_delivered()
        now = self._clock()
        wanted = {batch.id: batch for batch in self._store.batches_in("in_progress", "finalizing", "cancelling")}
        for id, active in self._active.items():
            completed, failed = active.opened.counts
            self._store.update_batch(id, ("in_progress",), completed=completed, failed=failed)
        for batch in wanted.values():
            if batch.id in self._delivering or batch.id in self._opening:
                continue
            if batch.id not in self._active:
                if batch.status == "cancelling" and not batch.in_progress_at:
                    self._store.update_batch(batch.id, ("cancelling",), status="cancelled", cancelled_at=int(now))
                else:
                    self._opening[batch.id] = self._files.submit(
                        OpenBatch, batch, self._places, self._settings, self._detokenizer
                    )
            elif batch.status == "cancelling":
                self._deliver(batch.id, "cancelled")
            elif now >= batch.expires_at:
                self._deliver(batch.id, "expired")
        activity = self._engine.activity
        state = EngineState(
            now, activity.phase.value, self._engine.pending, activity.prefill_tokens, activity.decode_tokens
        )
        self._store.set_engine(state)

    def _take_opened(self) -> None:
        for id, future in list(self._opening.items()):
            if not future.done():
                continue
            del self._opening[id]
            batch = self._store.any_batch(id)
            try:
                opened = future.result()
            except HpcgenError as error:
                _log.error("%s: %s", id, error)
                fail(self._store, batch, "batch_failed", "The server cannot run this batch; its operator can see why.")
                continue
            self._active[id] = self._begin(opened)
            if batch.status != "in_progress":
                self._deliver(id, batch.ending or "cancelled")

    def _begin(self, opened: OpenBatch) -> _Active:
        """A batch goes into the engine, or goes on there."""
        self._events.open(opened.batch.id, opened.events_path, len(opened.input))
        begun = {sequence.request for sequence in opened.saved}
        intake = Intake(
            opened.input,
            self._settings.model,
            0,
            0,
            skip=lambda request: not opened.results.is_wanted(request) or request in begun,
            ahead=max(64, self._wave // 8),
            pool=self._tokenizers,
        )
        active = _Active(opened, intake)
        for sequence in opened.saved:
            if sequence.status is Status.FINISHED:
                opened.results.finish(sequence)
            else:
                active.saved.append(sequence)
        active.saved.reverse()
        if begun:
            tokens = sum(len(sequence.output) for sequence in opened.saved)
            self._events.write(opened.batch.id, "restored", sequences=len(opened.saved), output_tokens=tokens)
        return active

    def _feed(self) -> None:
        """Requests of all batches in turn, until the engine has a wave."""
        hungry = True
        while hungry and self._engine.backlog < self._wave:
            hungry = False
            for active in list(self._active.values()):
                if active.saved:
                    hungry = True
                    self._add(active, active.saved.pop())
                elif (item := active.intake.take(block=False)) is not None:
                    hungry = True
                    self._take(active, item)

    def _take(self, active: _Active, item: IntakeItem) -> None:
        if item.error is not None:
            active.opened.results.fail(item.request, item.error)
        for sequence in item.sequences:
            self._add(active, sequence)

    def _add(self, active: _Active, sequence: Sequence) -> None:
        # Sequences of several batches meet here: ids in the order of arrival, over all of them.
        sequence.id = self._next_id
        self._next_id += 1
        self._batch_of[sequence.id] = active.opened.batch.id
        active.sequences[sequence.id] = sequence
        self._engine.add(sequence)

    def _finish(self, sequence: Sequence) -> None:
        active = self._active[self._batch_of.pop(sequence.id)]
        del active.sequences[sequence.id]
        active.opened.results.finish(sequence)

    def _save_if_due(self) -> None:
        """Saves the unfinished sequences of all batches, where it is time; the engine goes on meanwhile."""
        self._saving = [future for future in self._saving if not future.done()]
        if self._saving or not self._schedule.due():
            return
        self._schedule.succeeded()
        for id, active in self._active.items():
            if (taken := self._snapshot(active)) is not None:
                self._saving.append(self._files.submit(self._save, id, active, taken))

    @staticmethod
    def _snapshot(active: _Active) -> Snapshot | None:
        return saved_sequences.snapshot(
            [*active.sequences.values(), *active.saved, *active.opened.results.unassembled()]
        )

    def _save(self, id: str, active: _Active, taken: Snapshot) -> None:
        try:
            active.opened.save(taken)
        except CheckpointFailed as error:
            _log.error("%s: %s", id, error)

    def _end_complete(self) -> None:
        for id, active in list(self._active.items()):
            if not active.sequences and not active.saved and active.intake.exhausted:
                active.opened.results.sync(now=True)
                self._deliver(id, "completed")

    def _deliver(self, id: str, ending: str) -> None:
        """Takes a batch out of the engine, and lets its outputs be written meanwhile."""
        active = self._active.pop(id)
        active.intake.close()
        self._engine.cancel(active.sequences)
        for key in active.sequences:
            del self._batch_of[key]
        finished, failed = active.opened.results.finished, active.opened.results.failed
        self._events.close(id, "finished" if ending == "completed" else ending, requests=finished, failed=failed)
        self._delivering[id] = self._files.submit(active.opened.deliver, self._store, self._places, ending)

    def _take_delivered(self) -> None:
        """A failure, such as a full disk, leaves a batch as it is: it is opened and delivered again."""
        for id, future in list(self._delivering.items()):
            if future.done():
                del self._delivering[id]
                error = future.exception()
                if error is not None:
                    _log.error("%s cannot be delivered yet: %s", id, error)
