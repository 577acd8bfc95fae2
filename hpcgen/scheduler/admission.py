"""Which sequences may enter, and the waves of a prefill phase."""

from __future__ import annotations

import heapq

from hpcgen.errors import HpcgenError
from hpcgen.scheduler.plan import Chunk, Limits, RankPlan
from hpcgen.scheduler.state import Cluster, Node, Tracked
from hpcgen.sequence import PAGE_TOKENS, pages_for


class NeverFits(HpcgenError):
    """A sequence that cannot run on this instance even when it is alone; the others can."""


def require_fit(sequence: int, max_length: int, limits: Limits) -> None:
    """Raises NeverFits where the KV of `max_length` tokens is larger than a host store or a device."""
    pages = pages_for(max_length)
    for room, place, option in (
        (limits.host_pages, "the host store of a node", "--host-memory"),
        (limits.device_pages, "the device of a rank", "--device-memory"),
    ):
        if room is not None and pages > room:
            raise NeverFits(
                f"sequence {sequence} may grow to {max_length} tokens, {pages} KV pages, and {place} has {room}: "
                f"raise {option}, or lower max_tokens"
            )


def has_room(cluster: Cluster, node: Node, sequence: Tracked) -> bool:
    """Whether a node may prefill a waiting sequence: below the watermark, or when it holds nothing at all."""
    if not node.ranks:
        return False
    if node.used == 0:
        return True
    below = cluster.limits.watermark * cluster.limits.host_pages
    return node.used + pages_for(sequence.target) <= below


def can_prefill(cluster: Cluster) -> bool:
    """Whether a wave would have any token."""
    if any(node.prefilling for node in cluster.nodes if node.ranks):
        return True
    oldest = cluster.waiting.first()
    if oldest is None:
        return False
    return any(has_room(cluster, node, cluster.sequences[oldest]) for node in cluster.nodes)


def fill_wave(cluster: Cluster, plans: list[RankPlan]) -> bool:
    """Give each rank up to `wave_tokens` prompt tokens, oldest sequences first. False when there was none to give.

    Sequences that are partly prefilled go first, on a rank of their node; then waiting ones are admitted in order,
    each on the rank with the fewest tokens whose node has room. A node that has none for one takes no other, and the
    first that fits nowhere ends the wave, so that a long sequence is not overtaken for ever.
    """
    room = {rank.index: cluster.limits.wave_tokens for rank in cluster.ranks if rank.alive}
    for node in cluster.nodes:
        least = [(-room[rank.index], rank.index) for rank in node.ranks]
        for index in sorted(node.prefilling):
            if not least or not _give(cluster.sequences[index], least, room, plans):
                break
    least = [(-tokens, rank) for rank, tokens in room.items()]
    heapq.heapify(least)
    node_of_rank = cluster.topology.node_of_rank
    while (oldest := cluster.waiting.first()) is not None:
        sequence = cluster.sequences[oldest]
        while least and not has_room(cluster, cluster.nodes[node_of_rank[least[0][1]]], sequence):
            heapq.heappop(least)
        if not least or not least[0][0]:
            break
        cluster.admit(sequence, node_of_rank[least[0][1]])
        _give(sequence, least, room, plans)
    return any(plan.chunks for plan in plans)


def _give(sequence: Tracked, least: list[tuple[int, int]], room: dict[int, int], plans: list[RankPlan]) -> bool:
    """One chunk of a sequence to the rank with the most room; a chunk that does not reach the end ends with a page."""
    rank = least[0][1]
    tokens = sequence.target - sequence.kv_length
    if tokens > room[rank]:
        end = sequence.kv_length + room[rank]
        tokens = max(end - end % PAGE_TOKENS - sequence.kv_length, 0) or room[rank]
    if not tokens:
        return False
    plans[rank].chunks.append(Chunk(sequence.id, sequence.kv_length, tokens))
    room[rank] -= tokens
    heapq.heapreplace(least, (-room[rank], rank))
    return True
