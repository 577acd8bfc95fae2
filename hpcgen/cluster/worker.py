"""One rank at work: carries out its orders and says what changed."""

import time
from collections.abc import Sequence as Seq

from hpcgen.cluster.messages import Change, Ending, Order, Outcome
from hpcgen.cluster.migration import Migrations
from hpcgen.cluster.watchdog import Watchdog
from hpcgen.engine.executor import Executor
from hpcgen.memory.host_store import HostStore
from hpcgen.scheduler.plan import Phase, Plan, Report
from hpcgen.sequence import Sequence


class _Reported:
    """How much of a sequence rank 0 knows."""

    __slots__ = ("logprobs", "pages", "prompt_logprobs", "tokens")

    def __init__(self, sequence: Sequence) -> None:
        self.tokens, self.pages, self.logprobs = len(sequence.output), len(sequence.pages), len(sequence.logprobs)
        self.prompt_logprobs = len(sequence.prompt_logprobs)


class Worker:
    """Follows orders with an executor. Rank 0's own worker has rank 0's copies themselves: it returns no changes."""

    def __init__(
        self,
        rank: int,
        executor: Executor,
        store: HostStore,
        watchdog: Watchdog,
        migrations: Migrations | None = None,
    ) -> None:
        self.rank, self.executor, self.watchdog = rank, executor, watchdog
        self._store, self._migrations = store, migrations
        self._reported: dict[int, _Reported] = {}

    def take_over(self, sequences: Seq[Sequence]) -> None:
        """From now on this rank works on these."""
        for sequence in sequences:
            self.executor.sequences[sequence.id] = sequence
            self._reported[sequence.id] = _Reported(sequence)

    def forget(self, sequences: Seq[int]) -> None:
        """Other ranks work on these, or nobody any more."""
        for key in sequences:
            self.executor.forget(key)
            self._reported.pop(key, None)

    def carry_out(self, order: Order) -> tuple[Outcome, list[Sequence]]:
        """Executes an order; gives what was done, and the sequences that ended here."""
        start = time.perf_counter()
        activity = self.executor.activity
        before = activity.prefill_tokens, activity.decode_tokens
        for key in order.cancel:
            self.executor.drop(self.executor.sequences[key])
            self._reported.pop(key, None)
        self._store.release(order.release)
        if self._migrations is not None:
            self._migrations.start(order.departures, order.arrivals)
        plan = Plan(order.phase, [], order.steps, partition=order.partition)
        report = Report(self.rank)
        touched = self._touched(order)
        ended = self.executor.execute(plan, order.part, report)
        outcome = Outcome(report)
        if self.rank:
            touched += list(self.executor.active)
            held = self.executor.sequences
            alive = [held[key] for key in dict.fromkeys(touched) if key in held]
            outcome.changes = [self._change(sequence) for sequence in [*alive, *ended]]
            outcome.endings = [Ending(s.id, s.finish_reason, s.text, s.error) for s in ended]
        if self._migrations is not None:
            moved = self._migrations.collect()
            report.lost = [sequence for sequence, pages in moved if pages is None]
            outcome.moved = [(sequence, pages) for sequence, pages in moved if pages is not None]
            report.migrated = [sequence for sequence, _ in outcome.moved]
        for sequence in ended:
            self._reported.pop(sequence.id, None)
        outcome.prefill_tokens = activity.prefill_tokens - before[0]
        outcome.decode_tokens = activity.decode_tokens - before[1]
        outcome.seconds = time.perf_counter() - start
        return outcome, ended

    def close(self) -> None:
        """Gives back what ranks hold together. Collective."""
        self.executor.peers.close()
        if self._migrations is not None:
            self._migrations.close()

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
        self._reported[sequence.id] = _Reported(sequence)
        return change
