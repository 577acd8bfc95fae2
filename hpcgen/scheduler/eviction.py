"""What gives way when memory runs out: a device YIELDs the most progressed, a host store discards the youngest."""

from __future__ import annotations

from hpcgen.scheduler.plan import RankPlan
from hpcgen.scheduler.rank import Rank
from hpcgen.scheduler.state import Cluster, Node
from hpcgen.sequence import Status


def grow(cluster: Cluster, steps: int) -> None:
    """Grant every active sequence the pages of its next `steps` tokens. May grant more than there are: then evict."""
    for node in cluster.nodes:
        for rank in node.ranks:
            node.used += rank.grant_until(rank.clock + steps)


def relieve_device(cluster: Cluster, rank: Rank, plan: RankPlan) -> bool:
    """YIELD the sequences with most progress until the rest fit the device; the rank's oldest one stays.

    The most progressed hold the most pages, so that the fewest give way. Whether any did.
    """
    pages = cluster.limits.device_pages
    if pages is None or rank.pages <= pages:
        return False
    oldest = min(rank.active)
    for sequence in sorted(rank.active.values(), key=lambda s: (-s.progress, -s.id)):
        if rank.pages <= pages:
            break
        if sequence.id != oldest:
            cluster.suspend(sequence)
            plan.suspend.append(sequence.id)
    return True


def relieve_host(cluster: Cluster, node: Node, needed: int, plans: list[RankPlan]) -> bool:
    """Discard the youngest sequences of a node until `needed` pages are free; never its oldest. Whether they are."""
    if cluster.host_room(node) >= needed:
        return True
    candidates = cluster.held(node)[1:]
    while candidates and cluster.host_room(node) < needed:
        discard(cluster, candidates.pop(), plans)
    return cluster.host_room(node) >= needed


def discard(cluster: Cluster, sequence: int, plans: list[RankPlan]) -> None:
    """Drop a sequence's KV, by the rank it is active on or else by the first of its node."""
    tracked = cluster.sequences[sequence]
    node = cluster.nodes[tracked.node]
    for rank in node.ranks:
        if sequence in plans[rank.index].suspend:
            plans[rank.index].suspend.remove(sequence)
            plans[rank.index].discard.append(sequence)
            break
    else:
        rank_index = tracked.rank if tracked.status is Status.ACTIVE else node.ranks[0].index
        plans[rank_index].discard.append(sequence)
    cluster.discard(tracked)
