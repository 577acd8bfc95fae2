"""A cluster of counters that executes plans to the letter and refuses what a real one could not do."""

import random

from hpcgen.scheduler import Chunk, Limits, Migration, Phase, Plan, RankPlan, Report, Scheduler, Topology
from hpcgen.sequence import PAGE_TOKENS, pages_for


class State:
    """One sequence as the cluster sees it. `length` is where it will end, unknown to the scheduler."""

    def __init__(self, prompt: int, max_length: int, kv_at_end: int):
        self.prompt = prompt
        self.max_length = max_length
        self.kv_at_end = kv_at_end
        self.kv = 0
        self.target = prompt
        self.node = -1
        self.rank = -1
        self.where = "waiting"
        self.moving_to = -1

    @property
    def host_pages(self) -> int:
        return pages_for(self.kv)


class Executor:
    """Runs a Scheduler to the end, checking at every step that memory holds and that moves are legal."""

    def __init__(self, topology: Topology, limits: Limits, seed: int = 0, migration_failures: float = 0.0):
        self.topology = topology
        self.limits = limits
        self.scheduler = Scheduler(topology, limits)
        self.random = random.Random(seed)
        self.migration_failures = migration_failures
        self.sequences: dict[int, State] = {}
        self.finished: list[int] = []
        self.decisions = 0
        self.phases: list[Phase] = []
        self.plans: list[Plan] = []
        self.dead: set[int] = set()
        self.lost_nodes: set[int] = set()

    def add(self, sequence: int, prompt: int, max_tokens: int, tokens: int) -> None:
        self.scheduler.add(sequence, prompt, prompt + max_tokens - 1)
        self.sequences[sequence] = State(prompt, prompt + max_tokens - 1, prompt + min(tokens, max_tokens) - 1)

    def run(self, most_decisions: int) -> None:
        while not self.scheduler.done:
            self.step()
            assert self.decisions <= most_decisions, f"not done after {most_decisions} decisions"
        assert self.scheduler.decide().phase is Phase.DONE
        assert not self.sequences

    def step(self, kill: tuple[int, bool] | None = None) -> Plan:
        """One decision and its execution, at the start of which a rank may die, alone or with its whole node."""
        plan = self.scheduler.decide()
        self.plans.append(plan)
        self.phases.append(plan.phase)
        self.decisions += 1
        reports = self.execute(plan, kill)
        for report in reports:
            self.scheduler.report(report)
        self._check_granted()
        return plan

    def execute(self, plan: Plan, kill: tuple[int, bool] | None = None) -> list[Report]:
        reports = [Report(rank) for rank in range(self.topology.ranks)]
        for rank, part in enumerate(plan.ranks):
            assert rank not in self.dead or part == RankPlan()
            for sequence in part.discard:
                self._discard(sequence, rank)
            for sequence in part.suspend:
                state = self.sequences[sequence]
                assert state.where == "active" and state.rank == rank
                state.where, state.rank = "yielding", -1
        self._start_migrations(plan)
        if kill:
            self._lose(plan, *kill)
        self._finish_migrations(reports, started=plan.migrations)
        for rank, part in enumerate(plan.ranks):
            assert not part.chunks or plan.phase is Phase.PREFILL
            assert part.chunks.tokens <= self.limits.wave_tokens
            if rank not in self.dead:
                for sequence in part.resume:
                    state = self.sequences[sequence]
                    assert state.where == "suspended" and state.node == self.topology.node_of_rank[rank]
                    state.where, state.rank = "active", rank
        if plan.phase is Phase.PREFILL:
            assert not [s for s in self.sequences.values() if s.where == "active"]
            for rank, part in enumerate(plan.ranks):
                for chunk in part.chunks if rank not in self.dead else ():
                    self._prefill(chunk, rank, reports[rank])
        else:
            self._decode(plan, reports)
        for state in self.sequences.values():
            if state.where == "yielding":
                state.where = "suspended"
        self._check_memory()
        return [report for report in reports if report.rank not in self.dead]

    def _lose(self, plan: Plan, rank: int, node_lost: bool) -> None:
        node = self.topology.node_of_rank[rank]
        local = {r for r, n in enumerate(self.topology.node_of_rank) if n == node}
        self.dead.add(rank)
        node_lost = node_lost or self.dead >= local
        for sequence, state in self.sequences.items():
            if state.rank == rank or sequence in plan.ranks[rank].resume or sequence in plan.ranks[rank].suspend:
                state.target = max(state.target, state.kv)
                if self.limits.device_pages is not None:
                    state.kv -= state.kv % PAGE_TOKENS
                state.where, state.rank = ("suspended" if state.kv == state.target else "prefilling"), -1
            if node_lost and state.moving_to == node:
                if state.node in self.lost_nodes:
                    self._forget(state)
                else:
                    state.where, state.moving_to = "suspended", -1
            if node_lost and state.node == node and state.moving_to < 0:
                self._forget(state)
        if node_lost:
            self.dead |= local
            self.lost_nodes.add(node)
        self.scheduler.lose_rank(rank, node_lost)

    def _discard(self, sequence: int, rank: int) -> None:
        state = self.sequences[sequence]
        assert state.node == self.topology.node_of_rank[rank] and state.moving_to < 0
        assert state.where != "active" or state.rank == rank
        oldest = min(i for i, s in self.sequences.items() if s.node == state.node and s.moving_to < 0)
        assert sequence != oldest, "the oldest sequence of a node was discarded"
        self._forget(state)

    def _forget(self, state: State) -> None:
        state.target = max(state.target, state.kv)
        state.kv, state.node, state.rank, state.where, state.moving_to = 0, -1, -1, "waiting", -1

    def _start_migrations(self, plan: Plan) -> None:
        for migration in plan.migrations:
            state = self.sequences[migration.sequence]
            assert state.where == "suspended" and state.node == migration.source != migration.destination
            assert migration.pages >= state.host_pages
            state.where, state.moving_to = "moving", migration.destination

    def _finish_migrations(self, reports: list[Report], started: list[Migration]) -> None:
        """Some of those that were under way before this plan arrive, some fail, some take longer."""
        new = {migration.sequence for migration in started}
        for sequence, state in self.sequences.items():
            if state.moving_to < 0 or sequence in new or self.random.random() < 0.5:
                continue
            living = (
                r for r, n in enumerate(self.topology.node_of_rank) if n == state.moving_to and r not in self.dead
            )
            report = reports[next(living)]
            if state.node in self.lost_nodes:
                self._forget(state)
                report.lost.append(sequence)
            elif self.random.random() < self.migration_failures:
                state.moving_to, state.where = -1, "suspended"
                report.returned.append(sequence)
            else:
                state.node, state.moving_to, state.where = state.moving_to, -1, "suspended"
                report.migrated.append(sequence)

    def _prefill(self, chunk: Chunk, rank: int, report: Report) -> None:
        state = self.sequences[chunk.sequence]
        node = self.topology.node_of_rank[rank]
        assert state.where in ("waiting", "prefilling") and state.node in (-1, node)
        assert chunk.start == state.kv and 0 < chunk.tokens <= state.target - state.kv
        state.where, state.node = "prefilling", node
        state.kv += chunk.tokens
        report.prefilled.add(*chunk)
        if state.kv == state.target:
            state.where = "suspended"
            if state.kv >= state.kv_at_end:
                self._finish(chunk.sequence, report)

    def _finish(self, sequence: int, report: Report) -> None:
        report.finished.append(sequence)
        self.finished.append(sequence)
        del self.sequences[sequence]

    def _decode(self, plan: Plan, reports: list[Report]) -> None:
        assert 0 <= plan.steps <= self.limits.decision_steps
        for report in reports:
            report.steps = plan.steps
        active = [(i, s) for i, s in self.sequences.items() if s.where == "active"]
        if not active and not self.dead:
            assert plan.steps == 0
        for _ in range(plan.steps):
            for _, state in active:
                if state.where != "active":
                    continue
                state.kv += 1
                assert state.kv <= state.max_length
                if state.kv >= state.kv_at_end:
                    state.where = "finished"
            self._check_memory()
            for sequence, state in active:
                if state.where == "finished" and sequence in self.sequences:
                    self._finish(sequence, reports[state.rank])

    def _check_memory(self) -> None:
        for node in range(self.topology.nodes):
            pages = sum(s.host_pages for s in self.sequences.values() if s.node == node)
            pages += sum(s.host_pages for s in self.sequences.values() if s.moving_to == node)
            assert pages <= self.limits.host_pages, f"node {node} is over its host store"
        for rank in range(self.topology.ranks):
            active = [s for s in self.sequences.values() if s.rank == rank]
            assert len(active) <= self.limits.max_active
            if self.limits.device_pages is not None:
                assert sum(s.host_pages for s in active) <= self.limits.device_pages, f"rank {rank} is over its device"

    def _check_granted(self) -> None:
        """What the scheduler granted covers what is used, and goes back to nothing."""
        for node in range(self.topology.nodes):
            used = sum(s.host_pages for s in self.sequences.values() if node in (s.node, s.moving_to))
            assert used <= self.scheduler.host_pages_used(node) <= self.limits.host_pages
        if not self.sequences:
            assert not any(self.scheduler.host_pages_used(node) for node in range(self.topology.nodes))
            assert not any(self.scheduler.device_pages_used(rank) for rank in range(self.topology.ranks))
