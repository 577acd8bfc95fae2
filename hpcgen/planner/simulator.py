"""An instance on a virtual clock: the real scheduler decides, and every plan takes the time that the costs say."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpcgen.planner.configuration import Configuration
from hpcgen.planner.costs import Costs
from hpcgen.planner.step_time import StepTime
from hpcgen.planner.timeline import Span
from hpcgen.planner.workload import Workload
from hpcgen.scheduler import NeverFits, Phase, Plan, Report, Scheduler, Topology
from hpcgen.sequence import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that dies, alone or with its whole node."""

    seconds: float
    rank: int
    node_lost: bool = False


@dataclass(slots=True)
class Outcome:
    """What a simulated batch came to. Times in seconds since its start."""

    finish: NDArray[np.float64]
    """When each sequence finished; NaN for one that can never fit."""
    seconds: float = 0.0
    """Batch completion time."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    busy: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Seconds that each rank computed."""
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    migrations: int = 0
    discards: int = 0
    decisions: int = 0
    spans: list[Span] = field(default_factory=list)

    @property
    def utilisation(self) -> float:
        return float(self.busy.mean() / self.seconds) if self.seconds else 0.0

    def completion_percentiles(self, *percentiles: float) -> list[float]:
        """Sequence completion times."""
        finished = self.finish[~np.isnan(self.finish)]
        return [float(np.percentile(finished, p)) for p in percentiles] if len(finished) else [0.0] * len(percentiles)


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
    before is lost with them, and `detection` seconds.
    """

    def __init__(
        self,
        costs: Costs,
        configuration: Configuration,
        workload: Workload,
        *,
        failures: Sequence[Failure] = (),
        detection: float = 1.0,
        decision_steps: int = PAGE_TOKENS,
        spans_of: int = 16,
        feed: bool = True,
    ):
        self.costs, self.configuration, self.workload = costs, configuration, workload
        self.clock = 0.0
        ranks = configuration.ranks
        self._node_of_rank = tuple(rank // configuration.ranks_per_node for rank in range(ranks))
        self.scheduler = Scheduler(Topology(self._node_of_rank), configuration.limits(costs.shape, decision_steps))
        self.outcome = Outcome(np.full(len(workload), np.nan), busy=np.zeros(ranks))
        self._prompts, self._outputs = workload.prompts.tolist(), workload.outputs.tolist()
        self._most = workload.most.tolist()
        self._kv = [0] * len(workload)
        self._ranks = [_Rank() for _ in range(ranks)]
        self._dead: set[int] = set()
        self._failures = sorted(failures, key=lambda failure: -failure.seconds)
        self._detection = detection
        self._interval = 0.0
        self._under_way: list[tuple[float, int, int]] = []
        self._link_free = [0.0] * configuration.nodes
        self._phase = Phase.PREFILL
        self._time = StepTime(costs, configuration)
        self._spans_of = spans_of
        if feed:
            for sequence in range(len(workload)):
                self.add(sequence)

    def add(self, sequence: int) -> bool:
        """Give the scheduler a sequence of the workload. False when it can never fit."""
        longest = self._prompts[sequence] + self._most[sequence] - 1
        try:
            self.scheduler.add(sequence, self._prompts[sequence], longest)
        except NeverFits:
            return False
        return True

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
            self._kv[sequence] = base + rank.steps
            rank.context -= self._kv[sequence]

    def _prefill(self, plan: Plan, reports: list[Report]) -> None:
        slowest, length, rows = 0, 0.0, 0
        for part, report in zip(plan.ranks, reports, strict=True):
            tokens = sum(chunk.tokens for chunk in part.chunks)
            report.prefilled = part.chunks
            if tokens > slowest:
                slowest, rows = tokens, len(part.chunks)
                length = sum(chunk.tokens * (2 * chunk.start + chunk.tokens) for chunk in part.chunks) / tokens
        seconds = self._time.prefill(slowest, length, rows)
        for report in reports:
            tokens = sum(chunk.tokens for chunk in report.prefilled)
            self._record(report.rank, "prefill", self.clock, seconds, seconds * tokens / slowest, 0, tokens)
            for chunk in report.prefilled:
                end = chunk.start + chunk.tokens
                self._kv[chunk.sequence] = end
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
            self.scheduler.lose_rank(failure.rank, failure.node_lost)
            self.clock += self._interval + self._detection

    def _record(
        self, rank: int, what: str, begin: float, seconds: float, busy: float, active: int, tokens: int
    ) -> None:
        self.outcome.busy[rank] += busy
        if rank < self._spans_of and seconds and (active or tokens):
            self.outcome.spans.append(Span(rank, what, begin, begin + seconds, active, tokens))
