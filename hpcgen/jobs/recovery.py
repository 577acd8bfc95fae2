"""Checkpoints of a running batch: when they are written, and what a run that starts again takes from them.

Each node writes a file of an epoch: tokens and state of its sequences, and their KV. Rank 0 decides, and writes the
manifest when all nodes have done their part.
"""

import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpcgen.batch.results import Results
from hpcgen.checkpoint.manifest import Manifest, commit, next_epoch
from hpcgen.checkpoint.node_tasks import Load, Loaded, Outcome, Save, SaveBeside, Saved, Wanted
from hpcgen.checkpoint.order import recompute_cost
from hpcgen.checkpoint.periodic import BackgroundWrite, CheckpointSchedule
from hpcgen.checkpoint.reader import Checkpoint, CheckpointReader, Key
from hpcgen.checkpoint.writer import CheckpointFailed, CheckpointWriter, Snapshot
from hpcgen.jobs.checkpoint_nodes import Nodes
from hpcgen.report.events import EventLog, read_events
from hpcgen.sequence import Sequence, Status, pages_for

RESTORED_SHARE = 0.9
"""Of the host store, the most that restored KV may take; what does not fit is recomputed when its turn comes."""
WRITING_SHARE = 0.1
"""Of the interval, the most that a periodic checkpoint may write for: of more KV than that it saves the best part. The
file system of a cluster is not ours alone, and KV can be recomputed."""
_POLL_SECONDS = 0.5
"""Between two questions whether the nodes have written their files."""


class RunningEngine(Protocol):
    """What recovery needs of an engine."""

    def sequences(self) -> list[Sequence]:
        """The unfinished ones, oldest first. A sequence that loses its pages gets another list of pages."""

    def add(self, sequence: Sequence, node: int | None = None) -> None:
        """Takes one; its first `kv_length` tokens have KV in its pages, on `node`. None: it has none."""

    def suspend_all(self) -> None:
        """YIELDs every active one, so that all KV is in the host store. Nothing may be run after it."""


@dataclass(slots=True)
class _Epoch:
    """A periodic checkpoint that the nodes are writing."""

    number: int
    begin: float
    owned: list[tuple[Sequence, list[int]]]
    """Sequences with KV in it, and the list of their pages as it was."""
    next_poll: float
    stall: float


class Recovery:
    """Saves and restores the unfinished sequences of a run. Call it between two decisions of the engine only.

    Args:
        directory: of the checkpoints.
        nodes: save and load.
        interval: seconds between periodic checkpoints; 0: none.
        events: gets an event for each checkpoint.
        say: shows a line to the user.
    """

    def __init__(
        self,
        directory: Path,
        nodes: Nodes,
        *,
        interval: float,
        events: EventLog,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._nodes = nodes
        self._interval = interval
        self._events = events
        self._say = say
        self._clock = clock
        self._schedule = CheckpointSchedule(interval, clock)
        self._epoch: _Epoch | None = None
        self._commit: BackgroundWrite[Manifest] | None = None
        self._last_epoch = 0

    def restore(self, engine: RunningEngine, results: Results, prefill_rate: float | None = None) -> set[int]:
        """Gives the engine what the newest checkpoint has.

        Args:
            prefill_rate: tokens/s that a rank prefilled at so far, to weigh loading KV against it; None: it is loaded.

        Returns:
            Requests that must not come from the input again.
        """
        reader = CheckpointReader(self._directory, self._warn)
        checkpoint = reader.latest(self._nodes.layout)
        if checkpoint is None:
            return set()
        unfinished = [s for s in checkpoint.sequences if results.is_wanted(s.request)]
        waiting = [s for s in unfinished if s.status is not Status.FINISHED]
        begin = self._clock()
        node_of = self._load_kv(checkpoint, waiting, prefill_rate)
        for sequence in unfinished:
            if sequence.status is Status.FINISHED:
                results.finish(sequence)
            else:
                engine.add(sequence, node_of.get(sequence.id))
        loaded, seconds = sum(s.kv_length for s in waiting), round(self._clock() - begin, 3)
        self._events.write(
            "restored", epoch=checkpoint.epoch, sequences=len(waiting), kv_tokens=loaded, seconds=seconds
        )
        if waiting:
            self._say(
                f"restored {len(waiting):,} sequences from checkpoint {checkpoint.epoch}, KV of {loaded:,} of "
                f"{sum(s.prefill_target for s in waiting):,} tokens"
            )
        return {s.request for s in unfinished}

    def inherit(self, engine: RunningEngine, results: Results, directory: Path, requests: Set[int]) -> set[int]:
        """Gives the engine what another instance, now dead, has of these requests in its newest checkpoint.

        Tokens alone: the host store is at work, and the KV is recomputed at prefill speed.

        Args:
            directory: of that instance's checkpoints.

        Returns:
            Requests that must not come from the input.
        """
        checkpoint = CheckpointReader(directory, self._warn).latest()
        if checkpoint is None:
            return set()
        unfinished = [s for s in checkpoint.sequences if s.request in requests and results.is_wanted(s.request)]
        for sequence in unfinished:
            sequence.kv_length, sequence.pages = 0, []
            if sequence.status is Status.FINISHED:
                results.finish(sequence)
            else:
                sequence.status = Status.WAITING
                engine.add(sequence)
        tokens = sum(len(s.output) for s in unfinished)
        self._events.write("inherited", epoch=checkpoint.epoch, sequences=len(unfinished), tokens=tokens)
        return {s.request for s in unfinished}

    def save_if_due(self, engine: RunningEngine, results: Results) -> None:
        """Moves the periodic checkpoint on: begins one where it is time, ends one that all nodes have written.

        Cheap: call it at every decision.
        """
        begin = self._clock()
        if self._commit is not None:
            if self._commit.finished:
                self._end(self._commit.result())
        elif self._epoch is not None:
            if begin >= self._epoch.next_poll:
                self._poll(engine)
                self._epoch.stall += self._clock() - begin
        elif self._schedule.due():
            self._begin(engine, results)

    def save_before_leaving(self, engine: RunningEngine, results: Results, deadline: float | None) -> bool:
        """Writes a checkpoint, tokens first, then KV until the deadline; whether at least the tokens are safe.

        Args:
            deadline: time of the clock at which it must be durable; None: as long as it takes.
        """
        if self._commit is not None and deadline is None:
            self._end(self._commit.result())
        self._epoch = self._commit = None
        engine.suspend_all()
        sequences = [*engine.sequences(), *results.unassembled()]
        begin, writer = self._clock(), CheckpointWriter(self._directory, layout=self._nodes.layout)
        try:
            number = self._next_epoch()
            tokens = writer.write_snapshot(number, Snapshot.of(sequences, lambda sequence: 0))
            self._note(self._committed(number, [tokens]), begin)
        except CheckpointFailed as error:
            self._warn(str(error))
            return False
        begin, number = self._clock(), self._next_epoch()
        left = None if deadline is None else max(deadline - begin, 0.0)
        parts = self._snapshots(sequences, lambda sequence: sequence.kv_length)
        answers = self._nodes.ask({node: Save(number, part, left) for node, part in parts.items()})
        try:
            self._note(self._committed(number, list(answers.values())), begin)
        except CheckpointFailed as error:
            self._warn(f"{error} The tokens are saved, their KV is not")
        return True

    def close(self) -> None:
        """Gives up a checkpoint that is being written."""
        self._nodes.close()
        if self._commit is not None:
            self._commit.result()

    def _load_kv(self, checkpoint: Checkpoint, sequences: list[Sequence], prefill_rate: float | None) -> dict[int, int]:
        """Spreads KV over the nodes, that first which costs most to recompute; each node loads its own.

        Sets `kv_length`, `pages` and `status` of all sequences; gives the node of each that has KV now.
        """
        nodes = self._nodes
        room = [int(nodes.pages * RESTORED_SHARE)] * nodes.count
        rate = None if prefill_rate is None else prefill_rate * nodes.ranks
        tasks = {node: Load([], rate) for node in range(nodes.count)}
        for sequence in sequences:
            sequence.kv_length, sequence.pages, sequence.status = 0, [], Status.WAITING
        stored = ((sequence, checkpoint.kv.get((sequence.request, sequence.sample))) for sequence in sequences)
        with_kv = [(sequence, kv) for sequence, kv in stored if kv is not None]
        for sequence, kv in sorted(with_kv, key=lambda pair: recompute_cost(pair[1].tokens), reverse=True):
            # The last token has no KV yet: its step computes it.
            tokens = min(kv.tokens, sequence.length - 1)
            # Pages for all that must have KV before it decodes will be granted to it.
            needed = pages_for(max(tokens, sequence.prefill_target))
            node = max(range(nodes.count), key=room.__getitem__)
            if tokens and needed <= room[node]:
                room[node] -= needed
                tasks[node].wanted.append(Wanted(sequence.id, kv, tokens))
        by_id = {sequence.id: sequence for sequence in sequences}
        node_of: dict[int, int] = {}
        for node, answer in nodes.ask({node: task for node, task in tasks.items() if task.wanted}).items():
            assert isinstance(answer, Loaded)
            for warning in answer.warnings:
                self._warn(warning)
            for key, (pages, tokens) in answer.kv.items():
                sequence = by_id[key]
                complete = tokens >= sequence.prefill_target
                sequence.pages, sequence.kv_length = pages, tokens
                sequence.status = Status.SUSPENDED if complete else Status.PREFILLING
                node_of[key] = node
        return node_of

    def _begin(self, engine: RunningEngine, results: Results) -> None:
        begin, number = self._clock(), self._next_epoch()
        parts = self._snapshots([*engine.sequences(), *results.unassembled()], self._stored_tokens)
        owned = [(sequence, sequence.pages) for sequence in engine.sequences() if sequence.pages]
        seconds = self._interval * WRITING_SHARE
        self._nodes.ask({node: SaveBeside(number, part, seconds) for node, part in parts.items()})
        now = self._clock()
        self._epoch = _Epoch(number, begin, owned, now + min(_POLL_SECONDS, seconds), now - begin)

    def _poll(self, engine: RunningEngine) -> None:
        """Has the manifest written when all nodes have their files."""
        epoch = self._epoch
        assert epoch is not None
        answers: dict[int, Outcome | None] = self._nodes.ask({node: Saved() for node in range(self._nodes.count)})
        outcomes = [answer for answer in answers.values() if answer is not None]
        if len(outcomes) < len(answers):
            epoch.next_poll = self._clock() + _POLL_SECONDS
            return
        held = {sequence.id for sequence in engine.sequences()}
        void = [(s.request, s.sample) for s, pages in epoch.owned if s.id not in held or s.pages is not pages]
        self._commit = BackgroundWrite(lambda: self._committed(epoch.number, outcomes, void))

    def _end(self, result: Manifest | CheckpointFailed) -> None:
        epoch, self._epoch, self._commit = self._epoch, None, None
        assert epoch is not None
        if isinstance(result, Manifest):
            self._schedule.succeeded()
            self._note(result, epoch.begin, epoch.stall)
        else:
            wait = self._schedule.failed()
            self._warn(f"{result} The run goes on, and tries again in {wait:.0f} s")
            self._events.write("checkpoint_failed", reason=str(result))

    def _committed(self, number: int, outcomes: list[Outcome], void: Iterable[Key] = ()) -> Manifest:
        """Raises CheckpointFailed where a node failed, or the manifest cannot be written."""
        files = []
        for outcome in outcomes:
            if isinstance(outcome, CheckpointFailed):
                raise outcome
            files.append(outcome)
        try:
            return commit(self._directory, number, files, void)
        except OSError as error:
            raise CheckpointFailed(f"checkpoint epoch {number} was not completed: {error.strerror}.") from error

    def _note(self, manifest: Manifest, begin: float, stall: float | None = None) -> None:
        """`stall`: seconds that the computation waited for a periodic checkpoint."""
        files = manifest.files
        self._events.write(
            "checkpoint", epoch=manifest.epoch, sequences=sum(f.sequences for f in files), pages=manifest.pages,
            pages_left_out=sum(f.pages_left_out for f in files), bytes=sum(f.size for f in files),
            seconds=round(self._clock() - begin, 3), stall=None if stall is None else round(stall, 4),
        )  # fmt: skip

    def _snapshots(self, sequences: list[Sequence], stored: Callable[[Sequence], int]) -> dict[int, Snapshot]:
        """Each node's part."""
        parts: dict[int, list[Sequence]] = {node: [] for node in range(self._nodes.count)}
        for sequence in sequences:
            parts[self._nodes.node_of(sequence.id)].append(sequence)
        return {node: Snapshot.of(part, stored) for node, part in parts.items()}

    def _stored_tokens(self, sequence: Sequence) -> int:
        """Tokens whose KV in the host store is true while the computation goes on."""
        return sequence.kv_length if self._nodes.in_place or sequence.status is not Status.ACTIVE else 0

    def _next_epoch(self) -> int:
        """Above all that left a trace, and all that another thread or node may be about to write."""
        self._last_epoch = max(next_epoch(self._directory), self._last_epoch + 1)
        return self._last_epoch

    def _warn(self, line: str) -> None:
        self._say(f"warning: {line}")


def prefill_rate(events: Path) -> float | None:
    """Tokens/s of a rank in the prefill of the jobs before; None where none was measured."""
    tokens, seconds, ranks = 0, 0.0, 1
    if events.exists():
        for event in read_events(events):
            if event["event"] == "opened":
                ranks = event.get("ranks", 1)
            elif event["event"] == "steps" and event.get("phase") == "prefill":
                tokens += event["tokens"]
                seconds += event["seconds"] * ranks
    return tokens / seconds if seconds > 0 else None
