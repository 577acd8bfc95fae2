"""An instance on a virtual clock: the real scheduler decides, and every plan takes the time that the costs say."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Sequence

import numpy as np

from hpcgen.planner.configuration import Configuration
from hpcgen.planner.costs import Costs
from hpcgen.planner.outcome import Failure, Outcome, Preemption
from hpcgen.planner.step_time import StepTime
from hpcgen.planner.timeline import Span
from hpcgen.planner.workload import Workload
from hpcgen.scheduler import NeverFits, Phase, Plan, Report, Scheduler, Topology
from hpcgen.scheduler.state import NOWHERE
from hpcgen.sequence import PAGE_TOKENS


class _Rank:
    """Sequences active on a rank: how many, their context, and by its own step count when each will be done."""

    __slots__ = ("active", "context", "done", "steps")

    def __init__(self) -> None:
        self.active: dict[int, int] = {}
        """Sequence -> KV length less the rank's step count when it was resumed."""
        self.context = 0
        self.steps = 0
        self.done: list[tuple[int, int]] = []


class Simulation:
    """Feeds a workload to one instance and steps it to the end.

    `spans_of` bounds the ranks whose timeline is kept. `failures` strike between decisions; the work of the interval
    before is lost with them, and `detection` seconds. So do `preemptions`, from which the instance comes back whole.
    """

    def __init__(
        self,
        costs: Costs,
        configuration: Configuration,
        workload: Workload,
        *,
        failures: Sequence[Failure] = (),
        preemptions: Sequence[Preemption] = (),
        detection: float = 1.0,
        decision_steps: int = PAGE_TOKENS,
        spans_of: int = 16,
    ):
        self.costs, self.configuration, self.workload = costs, configuration, workload
        self.clock = 0.0
        ranks = configuration.ranks
        self._node_of_rank = tuple(rank // configuration.ranks_per_node for rank in range(ranks))
        self._limits = configuration.limits(costs.shape, decision_steps)
        self.scheduler = Scheduler(Topology(self._node_of_rank), self._limits)
        self.outcome = Outcome(np.full(len(workload), np.nan), busy=np.zeros(ranks))
        self._prompts, self._outputs = workload.prompts.tolist(), workload.outputs.tolist()
        self._most = workload.most.tolist()
        self._kv = [0] * len(workload)
        self._longest_kv = [0] * len(workload)
        """The most KV that each sequence has had: its tokens are known, whatever became of the KV."""
        self._node = [NOWHERE] * len(workload)
        self._ranks = [_Rank() for _ in range(ranks)]
        self._dead: set[int] = set()
        self._failures = sorted(failures, key=lambda failure: -failure.seconds)
        self._preemptions = sorted(preemptions, key=lambda preemption: -preemption.seconds)
        self._detection = detection
        self._interval = 0.0
        self._under_way: list[tuple[float, int, int]] = []
        self._link_free = [0.0] * configuration.nodes
        self._phase = Phase.PREFILL
        self._time = StepTime(costs, configuration)
        self._spans_of = spans_of
        for sequence in range(len(workload)):
            self._add(sequence)

    def _add(self, sequence: int, generated: int = 0, kv_length: int = 0) -> None:
        """Give the scheduler a sequence; one that can never fit is left out."""
        prompt = self._prompts[sequence]
        with contextlib.suppress(NeverFits):
            self.scheduler.add(
                sequence,
                prompt,
                prompt + self._most[sequence] - 1,
                generated=generated,
                kv_length=kv_length,
                node=self._node[sequence] if kv_length else None,
            )

    def run(self) -> Outcome:
        while not self.scheduler.done:
            self.step()
        self.outcome.seconds = self.clock
        return self.outcome

    def step(self) -> None:
        """One decision: its plan, its time, its reports."""
        self._strike()
        plan = self.scheduler.decide()
        if plan.phase is Phase.DONE:
            return
        self.outcome.decisions += 1
        reports = [Report(rank) for rank in range(len(self._ranks))]
        begin = self.clock
        self._move(plan)
        if plan.phase is Phase.PREFILL:
            self._prefill(plan, reports)
        else:
            self._decode(plan, reports)
        self._arrive(reports)
        self._interval = self.clock - begin
        name = plan.phase.value
        self.outcome.phase_seconds[name] = self.outcome.phase_seconds.get(name, 0.0) + self._interval
        for report in reports:
            if report.rank not in self._dead:
                self.scheduler.report(report)

    def _move(self, plan: Plan) -> None:
        """YIELD, COMBINE and MIGRATE, and the change of the device at a phase switch."""
        loads = 0.0
        for rank, part in zip(self._ranks, plan.ranks, strict=True):
            moved = len(part.suspend) * PAGE_TOKENS // 2  # the last page, half full
            for sequence in part.discard:
                self._leave(rank, sequence)
                self._node[sequence] = NOWHERE
            self.outcome.discards += len(part.discard)
            for sequence in part.suspend:
                self._leave(rank, sequence)
            for sequence in part.resume:
                kv = self._kv[sequence]
                rank.active[sequence] = kv - rank.steps
                rank.context += kv
                moved += kv
                left = self._prompts[sequence] + self._outputs[sequence] - 1 - kv
                heapq.heappush(rank.done, (rank.steps + left, sequence))
            loads = max(loads, moved)
        if self.configuration.in_place:
            return
        self.clock += 0.0 if self.configuration.decode.kv_streamed else self.costs.kv_seconds(loads)
        if plan.phase is not self._phase:
            self._phase = plan.phase
            self.clock += self._time.reconfigure(plan.phase)
        for migration in plan.migrations:
            seconds = self.costs.migrate_seconds(self._kv[migration.sequence])
            begin = max(self.clock, self._link_free[migration.destination])
            self._link_free[migration.destination] = begin + seconds
            heapq.heappush(self._under_way, (begin + seconds, migration.sequence, migration.destination))
            self.outcome.migrations += 1

    def _leave(self, rank: _Rank, sequence: int) -> None:
        base = rank.active.pop(sequence, None)
        if base is not None:
            kv = self._kv[sequence] = base + rank.steps
            self._longest_kv[sequence] = max(self._longest_kv[sequence], kv)
            rank.context -= kv

    def _prefill(self, plan: Plan, reports: list[Report]) -> None:
        slowest, length, rows = 0, 0.0, 0
        for part, report in zip(plan.ranks, reports, strict=True):
            tokens = part.chunks.tokens
            report.prefilled = part.chunks
            if tokens > slowest:
                slowest, rows = tokens, len(part.chunks)
                length = sum(chunk.tokens * (2 * chunk.start + chunk.tokens) for chunk in part.chunks) / tokens
        seconds = self._time.prefill(slowest, length, rows)
        for report in reports:
            tokens = report.prefilled.tokens
            self._record(report.rank, "prefill", self.clock, seconds, seconds * tokens / slowest, 0, tokens)
            for chunk in report.prefilled:
                end = chunk.start + chunk.tokens
                self._kv[chunk.sequence] = end
                self._longest_kv[chunk.sequence] = max(self._longest_kv[chunk.sequence], end)
                self._node[chunk.sequence] = self._node_of_rank[report.rank]
                self.outcome.prefilled_tokens += chunk.tokens
                if end >= self._prompts[chunk.sequence] + self._outputs[chunk.sequence] - 1:
                    report.finished.append(chunk.sequence)
                    self.outcome.finish[chunk.sequence] = self.clock + seconds
        self.clock += seconds

    def _decode(self, plan: Plan, reports: list[Report]) -> None:
        steps = plan.steps
        if steps == 0:  # nothing to do until a MIGRATE is there
            self.clock = max(self.clock, self._under_way[0][0] if self._under_way else self.clock)
            return
        loads = []
        for rank in self._ranks:
            ending = 0
            horizon = rank.steps + steps
            if rank.done and rank.done[0][0] <= horizon:
                ending = sum(1 for end, sequence in rank.done if end <= horizon and sequence in rank.active)
            sequences = len(rank.active) - ending / 2
            loads.append((max(sequences, 0.0), rank.context + sequences * steps / 2))
        split = bool(plan.partition)
        step_seconds, computing = self._time.decode(loads, split, len(self._ranks) - len(self._dead))
        seconds = steps * step_seconds
        for index, (rank, report) in enumerate(zip(self._ranks, reports, strict=True)):
            if index in self._dead:
                continue
            count = len(rank.active)
            self._record(index, "decode", self.clock, seconds, steps * computing[index], count, 0)
            report.steps = steps
            before = rank.steps
            rank.steps += steps
            rank.context += count * steps
            while rank.done and rank.done[0][0] <= rank.steps:
                end, sequence = heapq.heappop(rank.done)
                base = rank.active.get(sequence)
                if base is None or base + end != self._prompts[sequence] + self._outputs[sequence] - 1:
                    continue  # it was suspended since
                del rank.active[sequence]
                rank.context -= base + rank.steps
                report.finished.append(sequence)
                self.outcome.finish[sequence] = self.clock + (end - before) * step_seconds
                self.outcome.decoded_tokens -= rank.steps - end
            self.outcome.decoded_tokens += count * steps
        self.clock += seconds

    def _arrive(self, reports: list[Report]) -> None:
        while self._under_way and self._under_way[0][0] <= self.clock:
            _, sequence, node = heapq.heappop(self._under_way)
            rank = next((r for r, n in enumerate(self._node_of_rank) if n == node and r not in self._dead), None)
            if rank is not None:
                reports[rank].migrated.append(sequence)
                self._node[sequence] = node

    def _strike(self) -> None:
        """Failures whose time has come: the last interval's time passes once more, in vain."""
        while self._failures and self._failures[-1].seconds <= self.clock:
            failure = self._failures.pop()
            if failure.rank in self._dead or len(self._dead) + 1 >= len(self._ranks):
                continue
            node = self._node_of_rank[failure.rank]
            local = {rank for rank, other in enumerate(self._node_of_rank) if other == node}
            lost = (
                {failure.rank} if not failure.node_lost and self._dead | {failure.rank} < self._dead | local else local
            )
            if lost | self._dead == set(range(len(self._ranks))):
                continue
            self._dead |= lost
            for rank in lost:
                for sequence in list(self._ranks[rank].active):
                    self._leave(self._ranks[rank], sequence)
                self._ranks[rank].done.clear()
            if lost == local:
                self._node = [NOWHERE if other == node else other for other in self._node]
            self.scheduler.lose_rank(failure.rank, failure.node_lost)
            self.clock += self._interval + self._detection
        while self._preemptions and self._preemptions[-1].seconds <= self.clock:
            self._preempt(self._preemptions.pop())

    def _preempt(self, preemption: Preemption) -> None:
        """A new scheduler takes what is unfinished, with the KV that was written in the grace time.

        What costs most to compute again for its bytes is written first: the longest contexts.
        """
        for rank in self._ranks:
            for sequence in list(rank.active):
                self._leave(rank, sequence)
            rank.done.clear()
        self._under_way.clear()
        self._dead.clear()
        nodes = self.configuration.nodes
        room = preemption.grace * self.costs.disk.bandwidth * nodes
        pages = [self._limits.host_pages] * nodes
        unfinished = np.flatnonzero(np.isnan(self.outcome.finish)).tolist()
        saved: dict[int, int] = {}
        written = 0.0
        for sequence in sorted(unfinished, key=lambda index: -self._kv[index]):
            node, kv = self._node[sequence], self._kv[sequence]
            # As many pages as it needs when it is whole, so that the store it is restored to can hold it.
            needed = -(-max(kv, self._longest_kv[sequence]) // PAGE_TOKENS)
            size = kv * self.costs.shape.kv_token_bytes
            if node != NOWHERE and kv and written + size <= room and needed <= pages[node]:
                saved[sequence] = kv
                written += size
                pages[node] -= needed
        self.scheduler = Scheduler(Topology(self._node_of_rank), self._limits)
        for sequence in unfinished:
            known = self._longest_kv[sequence]
            prompt = self._prompts[sequence]
            if sequence not in saved:
                self._node[sequence] = NOWHERE
            self._add(sequence, known - prompt + 1 if known >= prompt else 0, saved.get(sequence, 0))
        self._phase = Phase.PREFILL
        self.clock += self._interval + preemption.away + self.costs.disk.seconds(written / nodes)
        self._link_free = [self.clock] * nodes

    def _record(
        self, rank: int, what: str, begin: float, seconds: float, busy: float, active: int, tokens: int
    ) -> None:
        self.outcome.busy[rank] += busy
        self.outcome.busy_in_phase[what] = self.outcome.busy_in_phase.get(what, 0.0) + busy
        if rank < self._spans_of and seconds and (active or tokens):
            self.outcome.spans.append(Span(rank, what, begin, begin + seconds, active, tokens))
