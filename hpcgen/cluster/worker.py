"""One rank at work: carries out its orders and says what changed."""

import time
from collections.abc import Sequence as Seq
from typing import NamedTuple

import psutil

from hpcgen.cluster.messages import Change, Ending, Health, Order, Outcome, SequenceState
from hpcgen.cluster.migration import Migrations
from hpcgen.cluster.shared_pages import SharedFreePages
from hpcgen.cluster.watchdog import Watchdog
from hpcgen.engine.executor import Executor
from hpcgen.memory.host_capacity import available_bytes
from hpcgen.memory.host_store import HostStore
from hpcgen.scheduler.plan import Phase, Plan, Report
from hpcgen.sequence import Sequence

_MEMORY_SECONDS = 2.0
"""Between two looks at the memory that is left."""


class _Reported(NamedTuple):
    """How much of a sequence rank 0 knows."""

    tokens: int
    pages: int
    logprobs: int
    prompt_logprobs: int

    @classmethod
    def of(cls, sequence: Sequence) -> "_Reported":
        known = (sequence.output, sequence.pages, sequence.logprobs, sequence.prompt_logprobs)
        return cls(*map(len, known))


class Worker:
    """Follows orders with an executor, on copies of the sequences that rank 0 has the truth of."""

    def __init__(
        self,
        rank: int,
        executor: Executor,
        store: HostStore,
        free: SharedFreePages,
        watchdog: Watchdog,
        migrations: Migrations | None = None,
        mortal: bool = False,
    ) -> None:
        """`free`: of the `store`. `mortal`: others may go on from the host store when this rank dies."""
        self.rank, self.executor, self.watchdog = rank, executor, watchdog
        self._store, self._free, self._migrations, self._mortal = store, free, migrations, mortal
        self._reported: dict[int, _Reported] = {}
        self._memory = (0, 0)
        self._next_look = 0.0
        self._last = time.perf_counter(), watchdog.waited
        """Time of the last report, and the seconds waited by then."""

    def carry_out(self, order: Order) -> Outcome:
        """Executes an order; gives what was done."""
        activity = self.executor.activity
        before = activity.prefill_tokens, activity.decode_tokens
        # Rank 0 has heard of what ended in the last interval, so those pages are free now.
        self._free.let_go()
        self._store.release(order.release)
        self._forget(order.forget)
        self._take_over(order.take_over)
        for key in order.cancel:
            self.executor.drop(self.executor.sequences[key])
            self._reported.pop(key, None)
        if self._migrations is not None:
            self._migrations.start(order.departures, order.arrivals)
        plan = Plan(order.phase, [], order.steps, partition=order.partition)
        report = Report(self.rank)
        self.executor.leave(order.part)
        with self._free.held():
            ended = self.executor.execute(plan, order.part, report)
        if self._mortal:
            self.executor.settle()
        outcome = Outcome(report, self._health())
        held = self.executor.sequences
        touched = [*self._touched(order), *self.executor.active]
        alive = [held[key] for key in dict.fromkeys(touched) if key in held]
        outcome.changes = [self._change(sequence) for sequence in [*alive, *ended]]
        outcome.endings = [Ending(s.id, s.finish_reason, s.text, s.error) for s in ended]
        for sequence in ended:
            self._reported.pop(sequence.id, None)
        if self._migrations is not None:
            moved = self._migrations.collect()
            report.returned = [sequence for sequence, pages in moved if pages is None]
            outcome.moved = [(sequence, pages) for sequence, pages in moved if pages is not None]
            report.migrated = [sequence for sequence, _ in outcome.moved]
        outcome.prefill_tokens = activity.prefill_tokens - before[0]
        outcome.decode_tokens = activity.decode_tokens - before[1]
        return outcome

    def rest(self) -> None:
        """No order is to come for now."""
        self._free.let_go()

    def lay_down(self) -> None:
        """Stops in the middle of an order, after a loss: all KV is in the host store, no sequence is this rank's."""
        self.executor.suspend_all()
        self._forget(list(self.executor.sequences))

    def leave_pages(self) -> None:
        """When ranks have regrouped: no page is this rank's; those that a MIGRATE may still write to are nobody's."""
        self._free.drop_held()
        if self._migrations is not None:
            self._free.retired |= set(self._migrations.abandon())

    def close(self) -> None:
        """Gives back what ranks hold together. Collective."""
        self.executor.peers.close()
        if self._migrations is not None:
            self._migrations.close()

    def _take_over(self, states: Seq[SequenceState]) -> None:
        """From now on this rank works on these."""
        for state in states:
            sequence = self.executor.sequences[state.id] = state.sequence()
            self._reported[state.id] = _Reported.of(sequence)

    def _forget(self, sequences: Seq[int]) -> None:
        """Other ranks work on these, or nobody any more."""
        for key in sequences:
            self.executor.forget(key)
            self._reported.pop(key, None)

    def _touched(self, order: Order) -> list[int]:
        part = order.part
        keys = [*part.discard, *part.suspend]
        if order.phase is Phase.PREFILL:
            keys += part.chunks.sequences
        return keys

    def _change(self, sequence: Sequence) -> Change:
        known = self._reported[sequence.id]
        # Pages only grow, or all go at once.
        first = min(known.pages, len(sequence.pages))
        change = Change(
            sequence.id,
            sequence.status,
            sequence.kv_length,
            sequence.output[known.tokens :].tobytes(),
            first,
            sequence.pages[first:],
            sequence.logprobs[known.logprobs :],
            sequence.prompt_logprobs[known.prompt_logprobs :],
        )
        self._reported[sequence.id] = _Reported.of(sequence)
        return change

    def _health(self) -> Health:
        now, waited = time.perf_counter(), self.watchdog.waited
        if now > self._next_look:
            self._next_look = now + _MEMORY_SECONDS
            self._memory = psutil.Process().memory_info().rss, available_bytes()
        health = Health(now - self._last[0], waited - self._last[1], *self._memory)
        self._last = now, waited
        return health
