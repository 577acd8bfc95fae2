"""The engine in one process: asks the scheduler, executes the plan, reports, and hands out what finished."""

import time
from collections.abc import Iterable

from hpcgen.engine.executor import Activity, Executor
from hpcgen.scheduler.admission import NeverFits
from hpcgen.scheduler.plan import Load, Phase, Report
from hpcgen.scheduler.scheduler import Scheduler
from hpcgen.sequence import Sequence, Status


class Engine:
    """Runs sequences to their end. `add` them, then call `step` until nothing is pending."""

    def __init__(self, scheduler: Scheduler, executor: Executor):
        self._scheduler, self._executor = scheduler, executor
        self._failed: list[Sequence] = []
        self.backlog = 0
        """Tokens that still have to be prefilled; whoever feeds the engine keeps a wave of them here."""

    @property
    def activity(self) -> Activity:
        return self._executor.activity

    @property
    def load(self) -> Load:
        return self._scheduler.load

    @property
    def pending(self) -> int:
        """Sequences that were added and not handed out."""
        return len(self._executor.sequences) + len(self._failed)

    def stop(self) -> None:
        """Nothing will be asked for until the next `step`."""

    def close(self) -> None:
        """Nothing more will be asked for."""

    def sequences(self) -> list[Sequence]:
        """The unfinished sequences, oldest first: what a checkpoint saves between two steps."""
        return [sequence for _, sequence in sorted(self._executor.sequences.items())]

    def add(self, sequence: Sequence, node: int | None = None) -> None:
        """Takes a sequence; the KV of one that has some is in the host store of `node`.

        One that can never fit fails alone, and comes out of the next `step` with its error.
        """
        try:
            self._scheduler.add(
                sequence.id,
                len(sequence.prompt),
                sequence.max_length,
                generated=len(sequence.output),
                kv_length=sequence.kv_length,
                node=node,
            )
        except NeverFits as error:
            sequence.error = str(error)
            self._executor.lifecycle.move(sequence, Status.FAILED)
            self._failed.append(sequence)
        else:
            self._executor.sequences[sequence.id] = sequence
            self.backlog += sequence.prefill_target - sequence.kv_length

    def suspend_all(self) -> None:
        """YIELDs every active sequence, so that all KV is in the host store. Nothing may be run after it."""
        self._executor.suspend_all()

    def cancel(self, keys: Iterable[int]) -> None:
        """Drops unfinished sequences that nobody waits for any more: they come out of no step."""
        wanted = set(keys)
        self._failed = [sequence for sequence in self._failed if sequence.id not in wanted]
        held = [key for key in wanted if key in self._executor.sequences]
        for key in held:
            sequence = self._executor.sequences[key]
            self.backlog -= max(sequence.prefill_target - sequence.kv_length, 0)
            self._executor.drop(sequence)
        self._scheduler.report(Report(rank=0, finished=held))

    def step(self) -> list[Sequence]:
        """Executes one decision. Returns the sequences that ended: FINISHED, or FAILED with an `error`."""
        failed, self._failed = self._failed, []
        plan = self._scheduler.decide()
        if plan.phase is Phase.DONE:
            return failed
        start = time.perf_counter()
        part, report = plan.ranks[0], Report(rank=0)
        self.backlog += sum(self._executor.sequences[key].kv_length for key in part.discard)
        self.backlog -= part.chunks.tokens
        self._executor.leave(part)
        ended = self._executor.execute(plan, part, report)
        self._scheduler.report(report)
        self.activity.seconds[plan.phase] += time.perf_counter() - start
        return failed + ended
