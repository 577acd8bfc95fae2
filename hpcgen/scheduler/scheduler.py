"""The scheduler of an instance: sequences and reports go in, plans come out. No clock, no device, no network."""

from __future__ import annotations

from hpcgen.scheduler.admission import fill_wave, require_fit
from hpcgen.scheduler.eviction import grow, relieve_device, relieve_host
from hpcgen.scheduler.partition import depart, split_last, spread, stragglers_only
from hpcgen.scheduler.phase import PhaseChoice
from hpcgen.scheduler.plan import Limits, Load, Phase, Plan, RankPlan, Report, Topology
from hpcgen.scheduler.rank import Tracked
from hpcgen.scheduler.refill import migrate, refill
from hpcgen.scheduler.state import Cluster, Node
from hpcgen.sequence import PAGE_TOKENS, Status


class Scheduler:
    """Decides for a whole instance. Call `decide`, let all ranks execute the plan, `report` what each did, repeat.

    A plan can always be executed as it stands: the pages that its steps and chunks come to need are granted in it.
    """

    def __init__(self, topology: Topology, limits: Limits):
        self._cluster = Cluster(topology, limits)
        self._phase = PhaseChoice(self._cluster)
        self.finished = 0
        """Sequences reported as finished."""

    def add(
        self,
        sequence: int,
        prompt_tokens: int,
        max_length: int,
        *,
        generated: int = 0,
        kv_length: int = 0,
        node: int | None = None,
    ) -> None:
        """Take a sequence; ids rise with arrival and are the FIFO order.

        `max_length` is the most tokens whose KV it can come to need (`Sequence.max_length`). One restored from a
        checkpoint has `generated` tokens, and where its KV is in the host store of `node`, `kv_length` tokens of it.
        Raises NeverFits when it could not run even alone; then only this sequence fails.
        """
        limits = self._cluster.limits
        require_fit(sequence, max_length, limits)
        tracked = Tracked(sequence, prompt_tokens, max_length, prompt_tokens + max(generated - 1, 0))
        self._cluster.sequences[sequence] = tracked
        if kv_length and node is not None:
            self._cluster.restore(tracked, node, kv_length)
        else:
            self._cluster.wait(tracked)

    def report(self, report: Report) -> None:
        """What one rank did since the last decision."""
        cluster = self._cluster
        sequences = cluster.sequences
        cluster.prefilled(report.prefilled)
        for sequence in report.migrated:
            if sequence in cluster.migrating:
                cluster.end_migration(sequences[sequence], arrived=True)
        for sequence in report.returned:
            if sequence in cluster.migrating:
                cluster.fail_migration(sequences[sequence])
        for sequence in report.finished:
            if sequence in sequences:
                cluster.finish(sequences[sequence])
                self.finished += 1
        for sequence in report.lost:
            if sequence in sequences and sequences[sequence].status is not Status.WAITING:
                cluster.discard(sequences[sequence])
        cluster.ranks[report.rank].clock += report.steps

    def lose_rank(self, rank: int, node_lost: bool = False) -> None:
        """A rank died, and with `node_lost`, or as the last of its node, the host store of its node too.

        What it did since its last report is lost. Of its active sequences the filled pages are in the host store, the
        last page is not (in place, all is). A MIGRATE to a lost node is off; one from a lost node ends by the report
        of the destination, as `migrated` or `lost`.
        """
        cluster = self._cluster
        dead = cluster.ranks[rank]
        node = cluster.nodes[dead.node]
        if not dead.alive:
            return
        in_flight = [cluster.sequences[index] for index in dead.yielding if index in cluster.sequences]
        for tracked in [*dead.active.values(), *(t for t in in_flight if t.status is Status.SUSPENDED)]:
            kept = tracked.kv_length
            if cluster.limits.device_pages is not None:
                kept -= kept % PAGE_TOKENS
            cluster.rewind(tracked, kept)
        dead.yielding.clear()
        dead.alive = False
        node.ranks.remove(dead)
        if node_lost or not node.ranks:
            self._lose_node(dead.node)

    def _lose_node(self, index: int) -> None:
        cluster = self._cluster
        node = cluster.nodes[index]
        node.alive = False
        for sequence in cluster.held(node):
            cluster.discard(cluster.sequences[sequence])
        for rank in node.ranks:
            rank.alive = False
            rank.yielding.clear()
        node.ranks.clear()
        node.departing.clear()
        for tracked in [cluster.sequences[sequence] for sequence in cluster.migrating]:
            if tracked.destination == index:
                cluster.end_migration(tracked, arrived=False)
                if not cluster.nodes[tracked.node].alive:
                    cluster.discard(tracked)

    def decide(self) -> Plan:
        """The next plan, from all that was added and reported."""
        cluster = self._cluster
        plans = [RankPlan() for _ in cluster.ranks]
        cluster.land()
        if self.done:
            return Plan(Phase.DONE, plans)
        if self._phase.wants_prefill():
            plan = self._prefill(plans)
            if plan is not None:
                return plan
        return self._decode(plans)

    def _prefill(self, plans: list[RankPlan]) -> Plan | None:
        """A wave. The device is given over to it: what is active is YIELDed first."""
        cluster = self._cluster
        if not fill_wave(cluster, plans):
            return None
        for rank in cluster.ranks:
            for tracked in list(rank.active.values()):
                cluster.suspend(tracked)
                plans[rank.index].suspend.append(tracked.id)
        self._phase.phase = Phase.PREFILL
        return Plan(Phase.PREFILL, plans, migrations=depart(cluster))

    def _decode(self, plans: list[RankPlan]) -> Plan:
        """Decode steps, after making room for their KV and filling what room is left."""
        cluster = self._cluster
        steps = cluster.limits.decision_steps
        self._phase.enter_decode()
        migrations = depart(cluster)
        grow(cluster, steps)
        closed = {rank.index for rank in cluster.ranks if relieve_device(cluster, rank, plans[rank.index])}
        for node in cluster.nodes:
            if not relieve_host(cluster, node, 0, plans):
                self._stand_by(node, plans)
            refill(cluster, node, closed, steps, plans)
        partition: tuple[tuple[int, tuple[int, ...]], ...] = ()
        migrations += migrate(cluster, steps)
        if stragglers_only(cluster):
            spread(cluster, plans)
            partition = split_last(cluster)
        return Plan(Phase.DECODE, plans, self._steps(steps), migrations, partition)

    def _stand_by(self, node: Node, plans: list[RankPlan]) -> None:
        """YIELD, youngest first, where a node cannot grow since its other pages are on their way by MIGRATE."""
        cluster = self._cluster
        active = sorted((tracked for rank in node.ranks for tracked in rank.active.values()), key=lambda t: -t.id)
        for tracked in active:
            if cluster.host_room(node) >= 0:
                break
            plans[tracked.rank].suspend.append(tracked.id)
            cluster.suspend(tracked)

    def _steps(self, most: int) -> int:
        """Steps until the next decision: no more than some active sequence can take."""
        steps = 0
        for rank in self._cluster.ranks:
            for tracked in rank.active.values():
                steps = max(steps, tracked.max_length - tracked.kv_length)
                if steps >= most:
                    return most
        return steps

    @property
    def done(self) -> bool:
        """Whether nothing that was added is unfinished."""
        return not self._cluster.sequences

    @property
    def unfinished(self) -> int:
        return len(self._cluster.sequences)

    @property
    def waiting(self) -> int:
        """Sequences without KV that no wave has taken yet."""
        return len(self._cluster.waiting)

    @property
    def prefilling(self) -> int:
        return sum(len(node.prefilling) for node in self._cluster.nodes)

    @property
    def suspended(self) -> int:
        """YIELDed sequences, those on their way by MIGRATE among them."""
        return self.unfinished - self.waiting - self.prefilling - self.active

    @property
    def active(self) -> int:
        return sum(len(rank.active) for rank in self._cluster.ranks)

    @property
    def load(self) -> Load:
        ranks, nodes = self._cluster.ranks, self._cluster.nodes
        return Load(
            active=[len(rank.active) for rank in ranks],
            suspended=self.suspended,
            waiting=self.waiting + self.prefilling,
            host_pages=[node.used for node in nodes],
        )

    def host_pages_used(self, node: int = 0) -> int:
        """Pages granted in the host store of a node."""
        return self._cluster.nodes[node].used

    def device_pages_used(self, rank: int = 0) -> int:
        """Pages granted on the device of a rank."""
        return self._cluster.ranks[rank].pages
