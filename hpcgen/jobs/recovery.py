"""Checkpoints of a running batch: when they are written, and what a run that starts again takes from them."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from hpcgen.batch.results import Results
from hpcgen.checkpoint.manifest import commit, next_epoch
from hpcgen.checkpoint.order import recompute_cost
from hpcgen.checkpoint.periodic import BackgroundWrite, CheckpointSchedule
from hpcgen.checkpoint.reader import Checkpoint, CheckpointReader, DamagedCheckpoint, StoredKV
from hpcgen.checkpoint.restore import RestoreRates, loading_is_cheaper
from hpcgen.checkpoint.writer import CheckpointFailed, CheckpointWriter, PageLayout, PageReader, Snapshot
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore
from hpcgen.report.events import EventLog, read_events
from hpcgen.sequence import PAGE_TOKENS, Sequence, Status, pages_for

RESTORED_SHARE = 0.9
"""Of the host store, the most that restored KV may take; what does not fit is recomputed when its turn comes."""
MEASURED_BYTES = 64 * 2**20
"""Loaded before the rate of loading is believed."""


class RunningEngine(Protocol):
    """What recovery needs of an engine."""

    def sequences(self) -> list[Sequence]:
        """The unfinished ones, oldest first."""

    def add(self, sequence: Sequence) -> None:
        """Takes one; where it owns pages, its first `kv_length` tokens have KV in them."""

    def suspend_all(self) -> None:
        """YIELDs every active one, so that all KV is in the host store. Nothing may be run after it."""


class Recovery:
    """Saves and restores the unfinished sequences of a run. Call it between two decisions of the engine only.

    Args:
        directory: of the checkpoints.
        store: KV pages to save from and restore into; None: tokens alone, all KV is recomputed.
        in_place: the host store is used in place. Else pages of an ACTIVE sequence may lag behind its device, and
            only its tokens are saved.
        interval: seconds between periodic checkpoints; 0: none.
        events: gets an event for each checkpoint.
        say: shows a line to the user.
    """

    def __init__(
        self,
        directory: Path,
        store: HostStore | None,
        *,
        in_place: bool,
        interval: float,
        events: EventLog,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._store = store
        self._in_place = in_place
        self._events = events
        self._say = say
        self._clock = clock
        self._layout = describe_layout(store.layout) if store is not None else {}
        self._writer = CheckpointWriter(directory, layout=self._layout, clock=clock)
        self._schedule = CheckpointSchedule(interval, clock)
        self._background: BackgroundWrite | None = None
        self.stall = 0.0
        """Seconds that the engine waited for periodic checkpoints."""

    def restore(self, engine: RunningEngine, results: Results, prefill_rate: float | None = None) -> set[int]:
        """Gives the engine what the newest checkpoint has.

        Args:
            prefill_rate: tokens/s of this run's prefill so far, to weigh loading KV against it; None: it is loaded.

        Returns:
            Requests that must not come from the input again.
        """
        checkpoint = CheckpointReader(self._directory, lambda line: self._say(f"warning: {line}")).latest(self._layout)
        if checkpoint is None:
            return set()
        unfinished = [s for s in checkpoint.sequences if not results.is_finished(s.request)]
        waiting = [s for s in unfinished if s.status is not Status.FINISHED]
        loaded = self._load_kv(checkpoint, waiting, prefill_rate)
        checkpoint.close()
        for sequence in unfinished:
            if sequence.status is Status.FINISHED:
                results.finish(sequence)
            else:
                self._take_back(engine, sequence)
        self._events.write("restored", epoch=checkpoint.epoch, sequences=len(waiting), kv_tokens=loaded)
        if waiting:
            self._say(
                f"restored {len(waiting):,} sequences from checkpoint {checkpoint.epoch}, KV of {loaded:,} of "
                f"{sum(s.prefill_target for s in waiting):,} tokens"
            )
        return {s.request for s in unfinished}

    def save_if_due(self, engine: RunningEngine, results: Results) -> None:
        """Starts a periodic checkpoint beside the computation where it is time. Cheap: call it at every decision."""
        if self._background is not None:
            if not self._background.finished:
                return
            self._end_background()
        if not self._schedule.due():
            return
        begin = self._clock()
        snapshot, pages = self._snapshot(engine, results)

        def write() -> None:
            self._write(snapshot, pages, None, self._clock())

        self._background = BackgroundWrite(write)
        self.stall += self._clock() - begin

    def save_before_leaving(self, engine: RunningEngine, results: Results, deadline: float | None) -> bool:
        """Writes a checkpoint, tokens first, then KV until the deadline; whether at least the tokens are safe.

        Args:
            deadline: time of the clock at which it must be durable; None: as long as it takes.
        """
        if self._background is not None:
            # Its pages cost time that this one needs; a thread that goes on writing aside does no harm.
            if self._background.finished or deadline is None:
                self._end_background()
            self._background = None
        begin = self._clock()
        engine.suspend_all()
        snapshot, pages = self._snapshot(engine, results)
        try:
            self._write(snapshot, None, None, begin)
        except CheckpointFailed as error:
            self._say(f"warning: {error}")
            return False
        try:
            if pages is not None:
                self._write(snapshot, pages, deadline, begin)
        except CheckpointFailed as error:
            self._say(f"warning: {error}")
        return True

    def close(self) -> None:
        """Waits for a checkpoint that is being written."""
        if self._background is not None:
            self._end_background()

    def _take_back(self, engine: RunningEngine, sequence: Sequence) -> None:
        engine.add(sequence)

    def _snapshot(self, engine: RunningEngine, results: Results) -> tuple[Snapshot, PageReader | None]:
        sequences = [*engine.sequences(), *results.unassembled()]
        snapshot = Snapshot.of(sequences, self._stored_tokens)
        return snapshot, self._page_reader(sequences) if self._store is not None else None

    def _stored_tokens(self, sequence: Sequence) -> int:
        """Tokens whose KV in the host store is true."""
        trusted = self._store is not None and (self._in_place or sequence.status is not Status.ACTIVE)
        return sequence.kv_length if trusted and sequence.status is not Status.FINISHED else 0

    def _page_reader(self, sequences: Iterable[Sequence]) -> PageReader:
        """Reads pages while the engine goes on: a copy counts if its page had the same owner before and after."""
        assert self._store is not None
        owners = {page: (s, i, s.kv_length) for s in sequences for i, page in enumerate(s.pages)}
        pages = self._store.pages.numpy()

        def owned(page: int) -> bool:
            sequence, i, tokens = owners[page]
            own = sequence.pages  # the engine replaces the list where a sequence loses its pages
            return i < len(own) and own[i] == page and sequence.kv_length >= tokens

        def read(page: int) -> memoryview | None:
            if not owned(page):
                return None
            copy = pages[page].copy()
            return memoryview(copy) if owned(page) else None

        return read

    def _write(self, snapshot: Snapshot, pages: PageReader | None, deadline: float | None, begin: float) -> None:
        epoch = next_epoch(self._directory)
        file = self._writer.write_snapshot(epoch, snapshot, pages, deadline)
        try:
            commit(self._directory, epoch, [file])
        except OSError as error:
            raise CheckpointFailed(f"checkpoint epoch {epoch} was not completed: {error.strerror}") from error
        self._events.write(
            "checkpoint", epoch=epoch, sequences=file.sequences, pages=file.pages, pages_left_out=file.pages_left_out,
            bytes=file.size, seconds=round(self._clock() - begin, 3),
        )  # fmt: skip

    def _end_background(self) -> None:
        assert self._background is not None
        failure = self._background.result()
        self._background = None
        if failure is None:
            self._schedule.succeeded()
        else:
            self._schedule.failed()
            self._say(f"warning: {failure}")
            self._events.write("checkpoint_failed", reason=str(failure))

    def _load_kv(self, checkpoint: Checkpoint, sequences: list[Sequence], prefill_rate: float | None) -> int:
        """Loads KV, of what costs most to recompute first; sets `kv_length`, `pages` and `status` of all sequences."""
        total, loaded_bytes, begin = 0, 0, self._clock()
        for sequence in sequences:
            sequence.kv_length, sequence.pages, sequence.status = 0, [], Status.WAITING
        if self._store is None:
            return 0
        page_bytes = self._store.layout.page_bytes
        stored = ((sequence, checkpoint.kv.get((sequence.request, sequence.sample))) for sequence in sequences)
        with_kv = [(sequence, kv) for sequence, kv in stored if kv is not None]
        for sequence, kv in sorted(with_kv, key=lambda pair: recompute_cost(pair[1].tokens), reverse=True):
            # The last token has no KV yet: its step computes it.
            tokens = min(kv.tokens, sequence.length - 1)
            if prefill_rate is not None and loaded_bytes >= MEASURED_BYTES:
                rates = RestoreRates(loaded_bytes / (self._clock() - begin), prefill_rate)
                if not loading_is_cheaper(tokens, page_bytes, rates):
                    continue
            # Pages for all that must have KV before it decodes will be granted to it.
            needed = pages_for(max(tokens, sequence.prefill_target))
            if self._store.count - self._store.free + needed > RESTORED_SHARE * self._store.count:
                continue
            total += self._load_sequence(checkpoint, sequence, kv, tokens)
            loaded_bytes += len(sequence.pages) * page_bytes
        return total

    def _load_sequence(self, checkpoint: Checkpoint, sequence: Sequence, kv: StoredKV, tokens: int) -> int:
        """Loads the KV of its first `tokens` tokens, or of those before the first damaged page; how many."""
        assert self._store is not None
        pages = self._store.allocate(pages_for(tokens))
        good = 0
        try:
            for good, page in enumerate(pages):
                checkpoint.load_page(kv, good, self._store.pages[page].numpy().data)
            good = len(pages)
        except DamagedCheckpoint as error:
            self._say(f"warning: {error}; the KV from there on is recomputed")
            self._store.release(pages[good:])
        sequence.pages = pages[:good]
        sequence.kv_length = min(tokens, good * PAGE_TOKENS)
        if sequence.kv_length:
            complete = sequence.kv_length >= sequence.prefill_target
            sequence.status = Status.SUSPENDED if complete else Status.PREFILLING
        return sequence.kv_length


def describe_layout(layout: KVLayout) -> PageLayout:
    """What must be equal where KV is restored."""
    return {name: value if isinstance(value, int) else str(value) for name, value in asdict(layout).items()}


def prefill_rate(events: Path) -> float | None:
    """Tokens/s of the prefill of the jobs before; None where none was measured."""
    tokens, seconds = 0, 0.0
    if events.exists():
        for event in read_events(events):
            if event["event"] == "steps" and event.get("phase") == "prefill":
                tokens += event["tokens"]
                seconds += event["seconds"]
    return tokens / seconds if seconds > 0 else None
