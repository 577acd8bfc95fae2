"""What the scheduler knows of the cluster: every unfinished sequence, and the pages granted by each node and rank."""

from __future__ import annotations

from hpcgen.scheduler.plan import Chunks, Limits, Topology
from hpcgen.scheduler.queue import Queue
from hpcgen.scheduler.rank import NOWHERE, Rank, Tracked
from hpcgen.sequence import PAGE_TOKENS, Status, pages_for

MOST_FAILED_MIGRATIONS = 3


class Node:
    """The sequences whose pages are in the host store of one node."""

    __slots__ = (
        "alive",
        "departing",
        "failed_migrations",
        "incoming",
        "incoming_pages",
        "prefilling",
        "ranks",
        "suspended",
        "used",
    )

    def __init__(self) -> None:
        self.alive = True
        self.ranks: list[Rank] = []
        """Living ranks of the node."""
        self.used = 0
        """Host pages granted."""
        self.suspended = Queue()
        self.prefilling: set[int] = set()
        self.departing: list[int] = []
        """YIELDed in order to MIGRATE in the next plan."""
        self.failed_migrations = 0
        self.incoming = 0
        """Sequences on their way here by MIGRATE, and the pages kept for them (counted in `used` too)."""
        self.incoming_pages = 0

    @property
    def active(self) -> int:
        return sum(len(rank.active) for rank in self.ranks)

    @property
    def may_give(self) -> bool:
        """Whether sequences may MIGRATE from here: each attempt that fails takes a sequence out for long."""
        return self.failed_migrations < MOST_FAILED_MIGRATIONS


class Cluster:
    """All state of the scheduler. The policy modules read it and change it through the methods below."""

    def __init__(self, topology: Topology, limits: Limits):
        self.topology = topology
        self.limits = limits
        self.sequences: dict[int, Tracked] = {}
        self.waiting = Queue()
        self.waiting_tokens = 0
        """Of prefill, of those that wait."""
        self.migrating: set[int] = set()
        self.nodes = [Node() for _ in range(topology.nodes)]
        self.ranks = [Rank(index, node) for index, node in enumerate(topology.node_of_rank)]
        for rank in self.ranks:
            self.nodes[rank.node].ranks.append(rank)

    def host_room(self, node: Node) -> int:
        return self.limits.host_pages - node.used

    def held(self, node: Node) -> list[int]:
        """Sequences with pages on a node, oldest first, but for those on their way to another one."""
        held = [*node.prefilling, *node.suspended, *node.departing]
        for rank in node.ranks:
            held += rank.active
            held += (index for index in rank.yielding if index in self.sequences and self.sequences[index].node >= 0)
        return sorted(held)

    def grant(self, sequence: Tracked, pages: int) -> None:
        """Change the pages granted to a sequence that is on no rank."""
        self.nodes[sequence.node].used += pages - sequence._pages
        sequence._pages = pages

    def wait(self, sequence: Tracked) -> None:
        """Into the queue of those that need a prefill of all their tokens."""
        self.waiting.push(sequence.id)
        self.waiting_tokens += sequence.target

    def admit_all(self, sequences: list[Tracked], node: int) -> None:
        """WAITING -> PREFILLING, with the pages of their whole prefill. They are still to leave `waiting`."""
        place, used, tokens = self.nodes[node], 0, 0
        admitted = Status.PREFILLING
        for sequence in sequences:
            sequence.node = node
            sequence.status = admitted
            target = sequence.target
            tokens += target
            sequence._pages = pages = -(-target // PAGE_TOKENS)
            used += pages
        place.prefilling.update([sequence.id for sequence in sequences])
        place.used += used
        self.waiting_tokens -= tokens

    def restore(self, sequence: Tracked, node: int, kv_length: int) -> None:
        """Place a sequence whose first `kv_length` tokens of KV are in the host store of `node`."""
        sequence.node = node
        sequence._kv = kv_length
        self._settle(sequence)

    def prefilled(self, chunks: Chunks) -> None:
        """These are done: PREFILLING -> SUSPENDED with the last one of a sequence."""
        sequences, nodes, prefilling, suspended = self.sequences, self.nodes, Status.PREFILLING, Status.SUSPENDED
        for index, start, tokens in chunks.rows():
            sequence = sequences.get(index)
            if sequence is None or sequence.status is not prefilling or start != sequence._kv:
                continue
            sequence._kv = start + tokens
            if start + tokens >= sequence.target:
                node = nodes[sequence.node]
                node.prefilling.discard(index)
                node.suspended.push(index)
                sequence.status = suspended

    def activate(self, sequence: Tracked, rank: Rank) -> None:
        """SUSPENDED -> ACTIVE on a rank of its node, with the pages of the rank's next steps."""
        node = self.nodes[sequence.node]
        node.suspended.remove(sequence.id)
        sequence.status = Status.ACTIVE
        node.used += rank.enter(sequence) - sequence._pages

    def suspend(self, sequence: Tracked, destination: int = NOWHERE) -> None:
        """ACTIVE -> SUSPENDED: YIELD, to MIGRATE next where there is a `destination`. In no queue until `land`."""
        rank = self.ranks[sequence.rank]
        rank.yielding.append(sequence.id)
        rank.leave(sequence)
        self.grant(sequence, pages_for(sequence.kv_length))
        sequence.status = Status.SUSPENDED
        sequence.destination = destination

    def land(self) -> None:
        """The last plan is done: what it YIELDed is in the host store, and enters the queue of its node."""
        for rank in self.ranks:
            for index in rank.yielding:
                sequence = self.sequences.get(index)
                if sequence is None or sequence.status is not Status.SUSPENDED:
                    continue
                node = self.nodes[rank.node]
                if sequence.destination == NOWHERE:
                    node.suspended.push(index)
                else:
                    node.departing.append(index)
            rank.yielding.clear()

    def start_migration(self, sequence: Tracked, destination: int) -> None:
        """A SUSPENDED sequence is out of every queue until the MIGRATE is reported; pages are granted on both nodes."""
        self.nodes[sequence.node].suspended.remove(sequence.id)
        sequence.destination = destination
        self._expect(destination, 1, sequence.pages)
        self.migrating.add(sequence.id)

    def end_migration(self, sequence: Tracked, arrived: bool) -> None:
        """To the destination if it `arrived`, else back into the queue of the source."""
        destination = sequence.destination
        self.migrating.discard(sequence.id)
        sequence.destination = NOWHERE
        self._expect(destination, -1, -sequence.pages)
        if arrived:
            self.nodes[sequence.node].used -= sequence.pages
            sequence.node = destination
            self.nodes[destination].used += sequence.pages
        self._settle(sequence)

    def fail_migration(self, sequence: Tracked) -> None:
        """Back to the source, which will not be asked many times more."""
        self.nodes[sequence.node].failed_migrations += 1
        self.end_migration(sequence, arrived=False)

    def discard(self, sequence: Tracked) -> None:
        """Its KV is gone: it waits for a prefill of all its tokens."""
        sequence.target = max(sequence.target, sequence.kv_length)
        self._displace(sequence)
        sequence._kv = 0
        sequence.status = Status.WAITING
        self.wait(sequence)

    def rewind(self, sequence: Tracked, kv_length: int) -> None:
        """A sequence lost its device, and with it the KV after `kv_length`; that part is prefilled again."""
        if sequence.on is not None:
            sequence.on.leave(sequence)
        sequence.destination = NOWHERE
        sequence.target = max(sequence.target, sequence.kv_length)
        sequence._kv = kv_length
        self._settle(sequence)

    def finish(self, sequence: Tracked) -> None:
        """Forget it; its pages are free."""
        if sequence.node == NOWHERE:
            self.waiting.remove(sequence.id)
            self.waiting_tokens -= sequence.target
        else:
            self._displace(sequence)
        del self.sequences[sequence.id]

    def _settle(self, sequence: Tracked) -> None:
        """Into the queue that a sequence on no rank belongs to, with the pages it needs there."""
        node = self.nodes[sequence.node]
        self.grant(sequence, pages_for(max(sequence.kv_length, sequence.target)))
        if sequence.kv_length >= sequence.target:
            sequence.status = Status.SUSPENDED
            node.suspended.push(sequence.id)
        else:
            sequence.status = Status.PREFILLING
            node.prefilling.add(sequence.id)

    def _displace(self, sequence: Tracked) -> None:
        """Out of its rank, its node and their queues; all pages are free."""
        node = self.nodes[sequence.node]
        if sequence.on is not None:
            sequence.on.leave(sequence)
        elif sequence.status is Status.PREFILLING:
            node.prefilling.discard(sequence.id)
        elif sequence.id in self.migrating:
            self.migrating.discard(sequence.id)
            self._expect(sequence.destination, -1, -sequence.pages)
        else:
            node.suspended.remove(sequence.id)
        node.used -= sequence._pages
        sequence._pages = 0
        sequence.node = sequence.destination = NOWHERE

    def _expect(self, node: int, sequences: int, pages: int) -> None:
        """Change what is on its way to a node."""
        self.nodes[node].incoming += sequences
        self.nodes[node].incoming_pages += pages
        self.nodes[node].used += pages
