"""Rank 0: asks the scheduler, sends every rank its orders, takes part itself, and brings its copies up to date."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

from hpcgen.cluster.messages import Arrival, Departure, Order, Outcome, SequenceState, SideTask, YieldAll, apply_change
from hpcgen.cluster.worker import Worker
from hpcgen.cluster.world import World
from hpcgen.coroutine.lifecycle import Lifecycle
from hpcgen.engine.executor import Activity
from hpcgen.scheduler.admission import NeverFits
from hpcgen.scheduler.plan import Load, Migration, Phase, Plan, RankPlan, Report
from hpcgen.scheduler.scheduler import Scheduler
from hpcgen.sequence import Sequence, Status

_PAUSE_SECONDS = 0.001
"""Between decisions while all that is left is on its way by MIGRATE."""


class Coordinator:
    """The engine of an instance, with the interface of `engine.Engine`: `add` sequences, then `step`."""

    def __init__(
        self,
        world: World,
        scheduler: Scheduler,
        worker: Worker,
        on_progress: Callable[[Activity], None] = lambda activity: None,
    ) -> None:
        """`on_progress` is called after every decision."""
        assert world.comm is not None
        self._world, self._comm = world, world.comm
        self._scheduler, self._worker, self._on_progress = scheduler, worker, on_progress
        self._watchdog = worker.watchdog
        self._sequences: dict[int, Sequence] = {}
        self._holder: dict[int, int] = {}
        """Rank that has the newest state of a sequence, beside rank 0."""
        self._restored: dict[int, int] = {}
        """Node that has the KV of a sequence which came with it and that no rank has taken over yet."""
        self._source: dict[int, int] = {}
        """Node that a sequence on its way by MIGRATE comes from."""
        self._unowned: list[tuple[int, list[int]]] = []
        """(node, pages) to be released with the next orders."""
        self._cancelled: list[tuple[int, int]] = []
        """(rank, sequence) to be dropped with the next orders."""
        self._leaving: dict[int, list[int]] = {}
        """Pages at the source of cancelled sequences that are on their way."""
        self._failed: list[Sequence] = []
        self._lifecycle: Lifecycle = worker.executor.lifecycle
        self.activity = Activity()
        """Of all ranks together; seconds are those of whole decisions."""
        self.backlog = 0
        """Tokens that still have to be prefilled."""

    @property
    def load(self) -> Load:
        return self._scheduler.load

    @property
    def pending(self) -> int:
        """Sequences that were added and not handed out."""
        return len(self._sequences) + len(self._failed)

    def sequences(self) -> list[Sequence]:
        """The unfinished sequences, oldest first, as of the last decision."""
        return [sequence for _, sequence in sorted(self._sequences.items())]

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
            self._lifecycle.move(sequence, Status.FAILED)
            self._failed.append(sequence)
        else:
            self._sequences[sequence.id] = sequence
            if node is not None:
                self._restored[sequence.id] = node
            self.backlog += sequence.prefill_target - sequence.kv_length

    @property
    def ranks(self) -> int:
        return self._world.size

    @property
    def nodes(self) -> int:
        return self._world.nodes

    def node_of(self, sequence: int) -> int | None:
        """The node whose host store has the sequence's KV; None where it has none."""
        if sequence in self._source:
            return self._source[sequence]
        holder = self._holder.get(sequence)
        return self._restored.get(sequence) if holder is None else self._world.node_of_rank[holder]

    def ask(self, tasks: Seq[object]) -> list[object]:
        """Has every rank carry out its task, between two decisions; their answers."""
        self._comm.scatter([SideTask(task) for task in tasks])
        own = self._worker.executor.side_task(tasks[0])
        return self._comm.gather(own) or []

    def suspend_all(self) -> None:
        """YIELDs every active sequence, so that all KV is in the host stores. Nothing may be run after it."""
        self.ask([YieldAll()] * self.ranks)

    def ask_leaders(self, tasks: Mapping[int, object]) -> dict[int, object]:
        """As `ask`, of the leaders of some nodes: node -> task to node -> answer."""
        leaders = {self._world.leader_of(node): node for node in tasks}
        answers = self.ask([tasks.get(leaders.get(rank, -1)) for rank in range(self.ranks)])
        return {node: answers[rank] for rank, node in leaders.items()}

    def cancel(self, keys: Iterable[int]) -> None:
        """Drops unfinished sequences that nobody waits for any more: they come out of no step."""
        wanted = set(keys)
        self._failed = [sequence for sequence in self._failed if sequence.id not in wanted]
        held = [key for key in wanted if key in self._sequences]
        for key in held:
            sequence = self._sequences.pop(key)
            self.backlog -= max(sequence.prefill_target - sequence.kv_length, 0)
            holder = self._holder.pop(key, None)
            if holder is not None:
                self._cancelled.append((holder, key))
            elif key in self._source:
                self._leaving[key] = sequence.pages
        self._scheduler.report(Report(rank=0, finished=held))

    def step(self) -> list[Sequence]:
        """Executes one decision on all ranks. Returns the sequences that ended: FINISHED, or FAILED with an `error`."""
        failed, self._failed = self._failed, []
        plan = self._scheduler.decide()
        if plan.phase is Phase.DONE:
            return failed
        start = time.perf_counter()
        for part in plan.ranks:
            self.backlog += sum(self._sequences[key].kv_length for key in part.discard)
            self.backlog -= part.chunks.tokens
        orders = self._orders(plan)
        if plan.phase is Phase.DECODE and not plan.steps:
            time.sleep(_PAUSE_SECONDS)
        self._watchdog.enter(plan.phase.value)
        self._comm.scatter(orders)
        outcome, ended = self._worker.carry_out(orders[0])
        with self._watchdog.waiting("the reports of other ranks"):
            outcomes = self._comm.gather(outcome) or []
        for rank, theirs in enumerate(outcomes):
            ended += self._take(rank, theirs)
        self._watchdog.enter("scheduling")
        self._note(plan, time.perf_counter() - start)
        return failed + ended

    def stop(self) -> None:
        """The other ranks leave `follow`, until it is called again."""
        self._comm.scatter([None] * self._comm.size)

    def close(self) -> None:
        """Gives back what ranks hold together; the others call `Worker.close`."""
        self._worker.close()
        self._world.others_ended = True

    def _orders(self, plan: Plan) -> list[Order]:
        orders = [Order(plan.phase, part, plan.steps, plan.partition) for part in plan.ranks]
        for rank, order in enumerate(orders):
            for key in _needed(order.part):
                self._hand_over(key, rank, orders)
        for migration in plan.migrations:
            self._migrate(migration, orders)
        for node, pages in self._unowned:
            orders[self._world.leader_of(node)].release += pages
        self._unowned.clear()
        for rank, key in self._cancelled:
            orders[rank].cancel.append(key)
        self._cancelled.clear()
        return orders

    def _migrate(self, migration: Migration, orders: list[Order]) -> None:
        source, destination = self._world.leader_of(migration.source), self._world.leader_of(migration.destination)
        sequence = self._sequences[migration.sequence]
        self._take_from_holder(sequence.id, orders)
        self._source[sequence.id] = migration.source
        orders[source].departures.append(Departure(sequence.id, destination, sequence.pages))
        orders[destination].arrivals.append(Arrival(SequenceState.of(sequence), source))

    def _take_from_holder(self, key: int, orders: list[Order]) -> None:
        holder = self._holder.pop(key, None)
        if holder == 0:
            self._worker.forget([key])
        elif holder is not None:
            orders[holder].forget.append(key)

    def _hand_over(self, key: int, rank: int, orders: list[Order]) -> None:
        """Sees to it that `rank` has the newest state of a sequence."""
        if self._holder.get(key) == rank:
            return
        self._take_from_holder(key, orders)
        self._holder[key] = rank
        self._restored.pop(key, None)
        sequence = self._sequences[key]
        if rank == 0:
            self._worker.take_over([sequence])
        else:
            orders[rank].take_over.append(SequenceState.of(sequence))

    def _take(self, rank: int, outcome: Outcome) -> list[Sequence]:
        """Applies what a rank did; gives the sequences that ended on another rank."""
        for change in outcome.changes:
            apply_change(self._sequences[change.id], change)
        ended = []
        for ending in outcome.endings:
            sequence = self._sequences[ending.id]
            sequence.finish_reason, sequence.text, sequence.error = ending.finish_reason, ending.text, ending.error
            ended.append(sequence)
        self.activity.migrated += len(outcome.moved)
        for key, pages in outcome.moved:
            if key in self._leaving:
                self._unowned.append((self._world.node_of_rank[rank], pages))
            self._leave_source(key, pages)
        for key in outcome.report.lost:
            if key in self._leaving:
                self._leave_source(key, [])
                continue
            sequence = self._sequences[key]
            self.backlog += sequence.kv_length
            sequence.kv_length, sequence.status = 0, Status.WAITING
            self._leave_source(key, [])
        for key in outcome.report.finished:
            del self._sequences[key], self._holder[key]
        self._scheduler.report(outcome.report)
        self.activity.prefill_tokens += outcome.prefill_tokens
        self.activity.decode_tokens += outcome.decode_tokens
        return ended

    def _leave_source(self, key: int, pages: list[int]) -> None:
        """A MIGRATE has ended: the pages at its source are nobody's, the sequence has others or none."""
        source = self._source.pop(key)
        if key in self._leaving:
            self._unowned.append((source, self._leaving.pop(key)))
            return
        sequence = self._sequences[key]
        self._unowned.append((source, sequence.pages))
        sequence.pages = pages

    def _note(self, plan: Plan, seconds: float) -> None:
        activity = self.activity
        activity.phase = plan.phase
        activity.seconds[plan.phase] += seconds
        activity.active = self._scheduler.active
        activity.discarded += sum(len(part.discard) for part in plan.ranks)
        activity.suspended += sum(len(part.suspend) for part in plan.ranks)
        if plan.phase is Phase.PREFILL:
            activity.waves += 1
        else:
            activity.steps += plan.steps
        self._on_progress(activity)


def _needed(part: RankPlan) -> list[int]:
    """Sequences whose state a rank needs for its part of a plan."""
    return [*part.discard, *part.suspend, *part.resume, *part.chunks.sequences]


def follow(world: World, worker: Worker) -> None:
    """The loop of every rank but 0: orders in, outcomes out, until rank 0 stops."""
    comm = world.comm
    assert comm is not None
    watchdog = worker.watchdog
    while True:
        with watchdog.waiting("orders of rank 0"):
            order = comm.scatter(None)
        if order is None:
            return
        if isinstance(order, SideTask):
            comm.gather(worker.executor.side_task(order.task))
            continue
        watchdog.enter(order.phase.value)
        worker.forget(order.forget)
        worker.take_over([state.sequence() for state in order.take_over])
        outcome, _ = worker.carry_out(order)
        with watchdog.waiting("the reports of other ranks"):
            comm.gather(outcome)
