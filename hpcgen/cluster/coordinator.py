"""Rank 0: asks the scheduler, sends every rank its orders, takes part itself, and keeps the books."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

from hpcgen.cluster.assemble import ClusterAssembly
from hpcgen.cluster.errors import RankLost
from hpcgen.cluster.exchange import Exchange
from hpcgen.cluster.health import HealthRecord
from hpcgen.cluster.ledger import Ledger
from hpcgen.cluster.messages import Outcome, SideTask, YieldAll
from hpcgen.cluster.survival import go_on
from hpcgen.cluster.world import Regrouping, World
from hpcgen.engine.executor import Activity
from hpcgen.scheduler.admission import NeverFits
from hpcgen.scheduler.plan import Load, Phase, Plan, Report, Topology
from hpcgen.scheduler.scheduler import Scheduler
from hpcgen.sequence import Sequence, Status

_PAUSE_SECONDS = 0.001
"""Between decisions while all that is left is on its way by MIGRATE."""


class Coordinator:
    """The engine of an instance, with the interface of `engine.Engine`: `add` sequences, then `step`."""

    def __init__(
        self,
        world: World,
        assembly: ClusterAssembly,
        on_progress: Callable[[Activity], None] = lambda activity: None,
        on_loss: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`on_progress` is called after every decision, `on_loss` with what is to be said of lost ranks."""
        self._world, self._assembly = world, assembly
        self._on_progress, self._on_loss = on_progress, on_loss
        self._scheduler = Scheduler(Topology(world.node_of_rank), assembly.limits)
        self._exchange = Exchange(world)
        self._ledger = Ledger(world)
        self._watchdog = assembly.worker.watchdog
        self._watchdog.still_missing = self._exchange.missing
        self._failed: list[Sequence] = []
        self.activity = Activity()
        """Of all ranks together; seconds are those of whole decisions."""
        self.backlog = 0
        """Tokens that still have to be prefilled."""
        self.health = HealthRecord(world)

    @property
    def load(self) -> Load:
        return self._scheduler.load

    @property
    def pending(self) -> int:
        """Sequences that were added and not handed out."""
        return len(self._ledger.sequences) + len(self._failed)

    @property
    def ranks(self) -> int:
        return self._world.size

    @property
    def nodes(self) -> int:
        return self._world.nodes

    def sequences(self) -> list[Sequence]:
        """The unfinished sequences, oldest first, as of the last decision."""
        return [sequence for _, sequence in sorted(self._ledger.sequences.items())]

    def node_of(self, sequence: int) -> int | None:
        """The node whose host store has the sequence's KV; None where it has none."""
        return self._ledger.node_of(sequence)

    def add(self, sequence: Sequence, node: int | None = None) -> None:
        """Takes a sequence; the KV of one that has some is in the host store of `node`.

        One that can never fit fails alone, and comes out of the next `step` with its error.
        """
        try:
            self._schedule(sequence, node)
        except NeverFits as error:
            self._fail(sequence, error)
        else:
            self._ledger.add(sequence, node)
            self.backlog += sequence.prefill_target - sequence.kv_length

    def cancel(self, keys: Iterable[int]) -> None:
        """Drops unfinished sequences that nobody waits for any more: they come out of no step."""
        wanted = set(keys)
        self._failed = [sequence for sequence in self._failed if sequence.id not in wanted]
        held = [key for key in wanted if key in self._ledger.sequences]
        for key in held:
            sequence = self._ledger.cancel(key)
            self.backlog -= max(sequence.prefill_target - sequence.kv_length, 0)
        self._scheduler.report(Report(rank=0, finished=held))

    def step(self) -> list[Sequence]:
        """Executes one decision on all ranks. Returns the sequences that ended: FINISHED, or FAILED with an `error`.

        Where ranks are lost and the others can go on, the next step is theirs.
        """
        ended, self._failed = self._failed, []
        plan = self._scheduler.decide()
        if plan.phase is Phase.DONE:
            return ended
        try:
            self._carry_out(plan, ended)
        except Exception as error:
            if not self._world.has_lost(error):
                raise
            self._go_on_without_the_lost()
        return ended

    def ask(self, tasks: Seq[object]) -> list[object]:
        """Has every rank carry out its task, between two decisions; their answers.

        Raises RankLost where one cannot answer; the others can be asked again.
        """
        try:
            self._exchange.send({rank: SideTask(task) for rank, task in enumerate(tasks) if rank})
            answers = {0: self._assembly.executor.side_task(tasks[0])}
            with self._watchdog.waiting("the answers of other ranks"):
                answers |= dict(self._exchange.answers())
        except Exception as error:
            if not self._world.has_lost(error):
                raise
            raise RankLost(self._go_on_without_the_lost()) from None
        return [answers[rank] for rank in range(len(tasks))]

    def ask_leaders(self, tasks: Mapping[int, object]) -> dict[int, object]:
        """As `ask`, of the leaders of some nodes: node -> task to node -> answer."""
        leaders = {self._world.leader_of(node): node for node in tasks}
        answers = self.ask([tasks.get(leaders.get(rank, -1)) for rank in range(self.ranks)])
        return {node: answers[rank] for rank, node in leaders.items()}

    def suspend_all(self) -> None:
        """YIELDs every active sequence, so that all KV is in the host stores. Nothing may be run after it."""
        try:
            self.ask([YieldAll()] * self.ranks)
        except RankLost:
            """Nobody works on anything then."""

    def stop(self) -> None:
        """The other ranks leave `follow`, until it is called again."""
        self._assembly.worker.rest()
        self._exchange.send_away()

    def close(self) -> None:
        """Gives back what ranks hold together; the others call `ClusterAssembly.close`."""
        self._assembly.close()
        self._world.others_ended = True

    def _carry_out(self, plan: Plan, ended: list[Sequence]) -> None:
        """Adds what ended to `ended`, also where not all ranks come to their report."""
        start = time.perf_counter()
        for part in plan.ranks:
            self.backlog += sum(self._ledger.sequences[key].kv_length for key in part.discard)
            self.backlog -= part.chunks.tokens
        activity = self.activity
        prefill_seconds = activity.seconds[Phase.PREFILL] * self.ranks / max(activity.prefill_tokens, 1)
        orders = self._ledger.orders(plan, prefill_seconds)
        if plan.phase is Phase.DECODE and not plan.steps:
            time.sleep(_PAUSE_SECONDS)
        self._watchdog.enter(plan.phase.value)
        self._exchange.send({rank: order for rank, order in enumerate(orders) if rank})
        ended += self._take(0, self._assembly.worker.carry_out(orders[0]))
        with self._watchdog.waiting("the reports of other ranks"):
            for rank, outcome in self._exchange.answers():
                ended += self._take(rank, outcome)
        self._watchdog.enter("scheduling")
        self._note(plan, time.perf_counter() - start)

    def _take(self, rank: int, outcome: Outcome) -> list[Sequence]:
        """Applies what a rank did; gives the sequences that ended."""
        self.backlog += sum(self._ledger.sequences[key].kv_length for key in outcome.report.lost)
        ended = self._ledger.take(rank, outcome)
        self._scheduler.report(outcome.report)
        self.health.add(rank, outcome.health)
        self.activity.migrated += len(outcome.moved)
        self.activity.prefill_tokens += outcome.prefill_tokens
        self.activity.decode_tokens += outcome.decode_tokens
        return ended

    def _go_on_without_the_lost(self) -> str:
        """After a loss: a new scheduler takes what is unfinished, with the KV that is left. Gives what happened."""
        world, assembly, lost = self._world, self._assembly, list[str]()
        whole = assembly.device.keeps_kv

        def owned(regrouping: Regrouping) -> list[int]:
            lost.extend(regrouping.lost)
            # After the first regrouping nothing is on any device.
            self._ledger.after_loss(regrouping, whole or len(lost) > len(regrouping.lost))
            pages = [self._ledger.owned(node) for node in range(world.nodes)]
            self._exchange.send({rank: pages[world.node_of_rank[rank]] for rank in range(1, world.size)})
            return pages[0]

        go_on(world, assembly, owned)
        self.health.begin_anew()
        self._scheduler = Scheduler(Topology(world.node_of_rank), assembly.limits)
        self.backlog = 0
        for sequence, node in self._ledger.withdraw():
            self.add(sequence, node)
        said = f"{' and '.join(lost)} gone: {world.size} ranks go on"
        self._on_loss(said)
        return said

    def _schedule(self, sequence: Sequence, node: int | None) -> None:
        self._scheduler.add(
            sequence.id,
            len(sequence.prompt),
            sequence.max_length,
            generated=len(sequence.output),
            kv_length=sequence.kv_length,
            node=node,
        )

    def _fail(self, sequence: Sequence, error: NeverFits) -> None:
        sequence.error = str(error)
        self._assembly.executor.lifecycle.move(sequence, Status.FAILED)
        self._failed.append(sequence)

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


def follow(world: World, assembly: ClusterAssembly) -> None:
    """The loop of every rank but 0: orders in, outcomes out, until rank 0 stops."""
    exchange = Exchange(world)
    while True:
        worker = assembly.worker
        try:
            with worker.watchdog.waiting("orders of rank 0"):
                order = exchange.receive()
            if order is None:
                worker.rest()
                return
            if isinstance(order, SideTask):
                exchange.answer(assembly.executor.side_task(order.task))
            else:
                worker.watchdog.enter(order.phase.value)
                exchange.answer(worker.carry_out(order))
        except Exception as error:
            if not world.has_lost(error):
                raise
            go_on(world, assembly, lambda regrouping: exchange.receive())
