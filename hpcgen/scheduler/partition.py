"""The last sequences of a batch: several are spread over the ranks, a single one is split over all of them."""

from __future__ import annotations

from hpcgen.scheduler.plan import Migration, RankPlan
from hpcgen.scheduler.rank import NOWHERE, Rank
from hpcgen.scheduler.refill import move
from hpcgen.scheduler.state import Cluster


def stragglers_only(cluster: Cluster) -> bool:
    """Whether so few sequences are left that ranks would idle, and none waits for a prefill."""
    return (
        len(cluster.sequences) <= cluster.limits.partition_below
        and not cluster.waiting
        and not any(node.prefilling for node in cluster.nodes)
    )


def spread(cluster: Cluster, plans: list[RankPlan]) -> None:
    """YIELD stragglers from ranks that have several while others have none; the next plan resumes them there.

    Idle ranks of the own node are used first; to another node they MIGRATE when they are written back.
    """
    idle = [rank for rank in cluster.ranks if rank.alive and not rank.active]
    idle = idle[len(cluster.sequences) - sum(len(rank.active) for rank in cluster.ranks) :]
    for rank in sorted(cluster.ranks, key=lambda r: -len(r.active)):
        while len(rank.active) > 1 and idle and not plans[rank.index].resume:
            target = _nearest(idle, rank, cluster.limits.migrate and cluster.nodes[rank.node].may_give)
            if target is None:
                break
            idle.remove(target)
            sequence = rank.active[max(rank.active)]
            cluster.suspend(sequence, NOWHERE if target.node == rank.node else target.node)
            plans[rank.index].suspend.append(sequence.id)


def _nearest(idle: list[Rank], rank: Rank, migrate: bool) -> Rank | None:
    for other in idle:
        if other.node == rank.node:
            return other
    return idle[0] if migrate else None


def depart(cluster: Cluster) -> list[Migration]:
    """MIGRATE what was YIELDed for it in the last plan, where its destination can still hold it."""
    migrations = []
    for node in cluster.nodes:
        for index in node.departing:
            sequence = cluster.sequences[index]
            target = cluster.nodes[sequence.destination]
            if target.ranks and cluster.host_room(target) >= sequence.pages + 1:
                migrations.append(move(cluster, sequence, sequence.destination))
            else:
                sequence.destination = NOWHERE
                node.suspended.push(index)
        node.departing.clear()
    return migrations


def split_last(cluster: Cluster) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The single active sequence over all living ranks by tensor parallelism."""
    if len(cluster.sequences) != 1 or not cluster.limits.split_last:
        return ()
    (sequence,) = cluster.sequences.values()
    ranks = tuple(rank.index for rank in cluster.ranks if rank.alive)
    return ((sequence.id, ranks),) if sequence.rank >= 0 and len(ranks) > 1 else ()
