"""Which sequences may enter, and the waves of a prefill phase."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from hpcgen.errors import HpcgenError
from hpcgen.scheduler.plan import Limits, RankPlan
from hpcgen.scheduler.rank import Tracked
from hpcgen.scheduler.state import Cluster, Node
from hpcgen.sequence import PAGE_TOKENS, pages_for

TURNS = 8
"""Runs that a rank gets in a wave: neighbours in the input are often alike, and should not all go to one rank."""


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

    Sequences that are partly prefilled go first, on a rank of their node; then waiting ones are admitted in order:
    runs of them to each rank in turn up to its fair part, and what that leaves one by one on the rank with the fewest
    tokens whose node has room. A node that has none for one takes no other, and the first that fits nowhere ends the
    wave, so that a long sequence is not overtaken for ever.
    """
    room = {rank.index: cluster.limits.wave_tokens for rank in cluster.ranks if rank.alive}
    for node in cluster.nodes:
        least = [(-room[rank.index], rank.index) for rank in node.ranks]
        for index in sorted(node.prefilling):
            if not least or not _give(cluster.sequences[index], least, room, plans):
                break
    order = cluster.waiting.oldest_first()
    oldest = _give_runs(cluster, order, room, plans)
    least = [(-tokens, rank) for rank, tokens in room.items()]
    heapq.heapify(least)
    node_of_rank = cluster.topology.node_of_rank
    taken = []
    while oldest is not None:
        sequence = cluster.sequences[oldest]
        while least and not has_room(cluster, cluster.nodes[node_of_rank[least[0][1]]], sequence):
            heapq.heappop(least)
        if not least or not least[0][0]:
            break
        cluster.admit_all([sequence], node_of_rank[least[0][1]])
        taken.append(oldest)
        _give(sequence, least, room, plans)
        oldest = next(order, None)
    cluster.waiting.remove_all(taken)
    return any(plan.chunks for plan in plans)


def _give_runs(cluster: Cluster, order: Iterator[int], room: dict[int, int], plans: list[RankPlan]) -> int | None:
    """Whole sequences to each rank in turn; gives the next one of `order`."""
    limits, sequences = cluster.limits, cluster.sequences
    below = int(limits.watermark * limits.host_pages)
    fair = min(cluster.waiting_tokens // max(len(room), 1), limits.wave_tokens)
    taken: list[int] = []
    oldest = next(order, None)
    for turn in range(1, TURNS + 1):
        level = fair * turn // TURNS
        for rank in room:
            if oldest is None:
                break
            place = cluster.topology.node_of_rank[rank]
            tokens, free = level - (limits.wave_tokens - room[rank]), below - cluster.nodes[place].used
            run = []
            while oldest is not None:
                sequence = sequences[oldest]
                target = sequence.target
                tokens -= target
                free -= -(-target // PAGE_TOKENS)
                if tokens < 0 or free < 0:
                    break
                run.append(sequence)
                oldest = next(order, None)
            if run:
                ids, targets = [sequence.id for sequence in run], [sequence.target for sequence in run]
                cluster.admit_all(run, place)
                plans[rank].chunks.add_whole(ids, targets)
                room[rank] -= sum(targets)
                taken += ids
    cluster.waiting.remove_all(taken)
    return oldest


def _give(sequence: Tracked, least: list[tuple[int, int]], room: dict[int, int], plans: list[RankPlan]) -> bool:
    """One chunk of a sequence to the rank with the most room; a chunk that does not reach the end ends with a page."""
    rank = least[0][1]
    tokens = sequence.target - sequence.kv_length
    if tokens > room[rank]:
        end = sequence.kv_length + room[rank]
        tokens = max(end - end % PAGE_TOKENS - sequence.kv_length, 0) or room[rank]
    if not tokens:
        return False
    plans[rank].chunks.add(sequence.id, sequence.kv_length, tokens)
    room[rank] -= tokens
    heapq.heapreplace(least, (-room[rank], rank))
    return True
