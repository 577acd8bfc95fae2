"""Which suspended sequences run next: FIFO from the own node, else by MIGRATE from the node with most."""

from __future__ import annotations

import heapq

from hpcgen.scheduler.eviction import relieve_host
from hpcgen.scheduler.plan import Migration, RankPlan
from hpcgen.scheduler.rank import Rank, Tracked
from hpcgen.scheduler.state import Cluster, Node


def refill(cluster: Cluster, node: Node, closed: set[int], steps: int, plans: list[RankPlan]) -> None:
    """Resume the node's suspended sequences, oldest first, each on its rank with the fewest active ones.

    Strictly in order: the first that fits on no rank waits, and so do those behind it. Ranks in `closed` have just
    run out of memory and take none.
    """
    ranks = [(len(rank.active), rank.index) for rank in node.ranks if rank.index not in closed]
    heapq.heapify(ranks)
    active = node.active
    if ranks and not active and node.suspended:
        _make_room_for_one(cluster, node, steps, plans)
    while ranks and (oldest := node.suspended.first()) is not None:
        sequence = cluster.sequences[oldest]
        pages = sequence.pages_after(steps)
        if not _fits_host(cluster, node, pages - sequence.pages, active):
            break
        too_full = []
        while ranks and not _fits_device(cluster, cluster.ranks[ranks[0][1]], pages):
            too_full.append(heapq.heappop(ranks))
        if not ranks:
            break
        count, index = ranks[0]
        cluster.activate(sequence, cluster.ranks[index])
        plans[index].resume.append(sequence.id)
        active += 1
        heapq.heapreplace(ranks, (count + 1, index))
        for entry in too_full:
            heapq.heappush(ranks, entry)


def _make_room_for_one(cluster: Cluster, node: Node, steps: int, plans: list[RankPlan]) -> None:
    """A node on which nothing runs discards the youngest until the oldest suspended one can run."""
    oldest = node.suspended.first()
    assert oldest is not None
    sequence = cluster.sequences[oldest]
    relieve_host(cluster, node, sequence.pages_after(steps) - sequence.pages, plans)


def _fits_host(cluster: Cluster, node: Node, growth: int, active: int) -> bool:
    """Whether one more may grow now, and all that are active by a page again at the next decision."""
    look_ahead = active + 1 if active else 0
    return growth + look_ahead <= cluster.host_room(node)


def _fits_device(cluster: Cluster, rank: Rank, pages: int) -> bool:
    """Whether a rank has room for one more now, and for a page more of all at the next decision."""
    limits = cluster.limits
    if len(rank.active) >= limits.max_active:
        return False
    if limits.device_pages is None or not rank.active:
        return True
    return rank.pages + pages + len(rank.active) + 1 <= limits.device_pages


def migrate(cluster: Cluster, steps: int) -> list[Migration]:
    """MIGRATEs to nodes that have room and no suspended sequence of their own, from the node with most, oldest first.

    A move never makes the giver the poorer of the two.
    """
    if not cluster.limits.migrate or len(cluster.nodes) < 2:
        return []
    nodes = list(enumerate(cluster.nodes))
    givers = [(-len(node.suspended), index) for index, node in nodes if node.suspended and node.may_give]
    takers = [
        (node.active + node.incoming, index)
        for index, node in nodes
        if node.ranks and not node.suspended and not any(rank.yielding for rank in node.ranks)
    ]
    heapq.heapify(givers)
    heapq.heapify(takers)
    migrations = []
    while givers and takers:
        giver = cluster.nodes[givers[0][1]]
        load, index = takers[0]
        taker = cluster.nodes[index]
        oldest = giver.suspended.first()
        assert oldest is not None
        sequence = cluster.sequences[oldest]
        if (load + 1) * max(len(giver.ranks), 1) > (giver.active + len(giver.suspended)) * len(taker.ranks):
            break
        if not _can_take(cluster, taker, sequence, load, steps):
            heapq.heappop(takers)
            continue
        migrations.append(move(cluster, sequence, index))
        heapq.heapreplace(takers, (load + 1, index))
        if giver.suspended:
            heapq.heapreplace(givers, (-len(giver.suspended), givers[0][1]))
        else:
            heapq.heappop(givers)
    return migrations


def move(cluster: Cluster, sequence: Tracked, destination: int) -> Migration:
    """Start the MIGRATE of a suspended sequence."""
    migration = Migration(sequence.id, sequence.node, destination, sequence.pages)
    cluster.start_migration(sequence, destination)
    return migration


def _can_take(cluster: Cluster, node: Node, sequence: Tracked, load: int, steps: int) -> bool:
    """Whether a node can hold one more sequence and, as far as can be told now, run it when it arrives."""
    limits = cluster.limits
    if load >= limits.max_active * len(node.ranks):
        return False
    pages = sequence.pages_after(steps)
    if node.used and node.used + pages + load > limits.watermark * limits.host_pages:
        return False
    if limits.device_pages is None or not load:
        return True
    free = sum(limits.device_pages - rank.pages - len(rank.active) for rank in node.ranks) - node.incoming_pages
    return pages + 1 <= free
