"""What the scheduler knows of the cluster: every unfinished sequence, and the pages granted by each node and rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from hpcgen.scheduler.plan import Limits, Topology
from hpcgen.sequence import PAGE_TOKENS, Status, pages_for

NOWHERE = -1
"""Node or rank of a sequence that has none."""


class Queue:
    """Sequence ids, oldest first: a set, put in order when the first is asked for.

    What the last sort found is popped from the end of a list; what was pushed since is in a small heap. An id that
    was removed from the middle is skipped when it is met.
    """

    __slots__ = ("_late", "_members", "_ordered")

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._ordered: list[int] = []
        self._late: list[int] | None = None

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[int]:
        """Members in no order; the queue may change meanwhile."""
        return iter(tuple(self._members))

    def push(self, sequence: int) -> None:
        self._members.add(sequence)
        if self._late is not None:
            heapq.heappush(self._late, sequence)

    def remove(self, sequence: int) -> None:
        self._members.discard(sequence)

    def first(self) -> int | None:
        """The oldest member, None of an empty queue."""
        members, ordered, late = self._members, self._ordered, self._late
        while ordered and ordered[-1] not in members:
            ordered.pop()
        if late is None or not ordered or len(late) > 2 * len(members) + 64:
            self._late = []
            ordered = self._ordered = sorted(members, reverse=True)
            return ordered[-1] if ordered else None
        while late and late[0] not in members:
            heapq.heappop(late)
        return late[0] if late and late[0] < ordered[-1] else ordered[-1]


class Tracked:
    """What is known of one unfinished sequence."""

    __slots__ = (
        "destination",
        "id",
        "kv_length",
        "max_length",
        "node",
        "pages",
        "prompt_tokens",
        "rank",
        "status",
        "target",
    )

    def __init__(self, sequence: int, prompt_tokens: int, max_length: int, target: int):
        self.id = sequence
        self.prompt_tokens = prompt_tokens
        self.max_length = max_length
        self.target = target
        """Tokens whose KV must exist before it can decode."""
        self.kv_length = 0
        """Tokens whose KV exists, by the last report."""
        self.status = Status.WAITING
        self.node = NOWHERE
        """Node whose host store has its pages."""
        self.rank = NOWHERE
        """Rank it is active on."""
        self.pages = 0
        """Pages granted to it in the host store of its node; the same number on the device while it is active."""
        self.destination = NOWHERE
        """Node it is to MIGRATE to."""

    @property
    def progress(self) -> int:
        """Tokens decoded."""
        return self.kv_length - self.prompt_tokens

    def pages_after(self, steps: int) -> int:
        """Pages of its KV when it has decoded `steps` more tokens, or all that it may."""
        return -(-min(self.kv_length + steps, self.max_length) // PAGE_TOKENS)


class Rank:
    """The sequences active on one rank, and the device pages granted to them."""

    __slots__ = ("active", "alive", "index", "node", "pages", "yielding")

    def __init__(self, index: int, node: int):
        self.index = index
        self.node = node
        self.alive = True
        self.active: dict[int, Tracked] = {}
        self.pages = 0
        self.yielding: list[int] = []
        """YIELDed in the last plan: in the host store, for others to use, when that plan is done."""


class Node:
    """The sequences whose pages are in the host store of one node."""

    __slots__ = (
        "alive",
        "departing",
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
        self.prefilling = Queue()
        self.departing: list[int] = []
        """YIELDed in order to MIGRATE in the next plan."""
        self.incoming = 0
        """Sequences on their way here by MIGRATE, and the pages kept for them (counted in `used` too)."""
        self.incoming_pages = 0

    @property
    def active(self) -> int:
        return sum(len(rank.active) for rank in self.ranks)


class Cluster:
    """All state of the scheduler. The policy modules read it and change it through the methods below."""

    def __init__(self, topology: Topology, limits: Limits):
        self.topology = topology
        self.limits = limits
        self.sequences: dict[int, Tracked] = {}
        self.waiting = Queue()
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
        """Change the pages granted to a sequence, in its node and on the rank it is active on."""
        change = pages - sequence.pages
        if change:
            sequence.pages = pages
            self.nodes[sequence.node].used += change
            if sequence.rank >= 0:
                self.ranks[sequence.rank].pages += change

    def admit(self, sequence: Tracked, node: int) -> None:
        """WAITING -> PREFILLING, with the pages of its whole prefill."""
        self.waiting.remove(sequence.id)
        sequence.node = node
        sequence.status = Status.PREFILLING
        self.grant(sequence, pages_for(sequence.target))
        self.nodes[node].prefilling.push(sequence.id)

    def restore(self, sequence: Tracked, node: int, kv_length: int) -> None:
        """Place a sequence whose first `kv_length` tokens of KV are in the host store of `node`."""
        self.waiting.remove(sequence.id)
        sequence.node = node
        sequence.kv_length = kv_length
        self._settle(sequence)

    def prefilled(self, sequence: Tracked, kv_length: int) -> None:
        """A chunk is done: PREFILLING -> SUSPENDED with the last one."""
        sequence.kv_length = kv_length
        if kv_length >= sequence.target:
            node = self.nodes[sequence.node]
            node.prefilling.remove(sequence.id)
            node.suspended.push(sequence.id)
            sequence.status = Status.SUSPENDED

    def activate(self, sequence: Tracked, rank: Rank, pages: int) -> None:
        """SUSPENDED -> ACTIVE on a rank of its node."""
        self.nodes[sequence.node].suspended.remove(sequence.id)
        sequence.status = Status.ACTIVE
        sequence.rank = rank.index
        rank.active[sequence.id] = sequence
        rank.pages += sequence.pages
        self.grant(sequence, pages)

    def suspend(self, sequence: Tracked, destination: int = NOWHERE) -> None:
        """ACTIVE -> SUSPENDED: YIELD, to MIGRATE next where there is a `destination`. In no queue until `land`."""
        self.ranks[sequence.rank].yielding.append(sequence.id)
        self._leave_rank(sequence)
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

    def discard(self, sequence: Tracked) -> None:
        """Its KV is gone: it waits for a prefill of all its tokens."""
        sequence.target = max(sequence.target, sequence.kv_length)
        self._displace(sequence)
        sequence.kv_length = 0
        sequence.status = Status.WAITING
        self.waiting.push(sequence.id)

    def rewind(self, sequence: Tracked, kv_length: int) -> None:
        """A sequence lost its device, and with it the KV after `kv_length`; that part is prefilled again."""
        if sequence.rank >= 0:
            self._leave_rank(sequence)
        sequence.destination = NOWHERE
        sequence.target = max(sequence.target, sequence.kv_length)
        sequence.kv_length = kv_length
        self._settle(sequence)

    def finish(self, sequence: Tracked) -> None:
        """Forget it; its pages are free."""
        if sequence.node == NOWHERE:
            self.waiting.remove(sequence.id)
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
            node.prefilling.push(sequence.id)

    def _leave_rank(self, sequence: Tracked) -> None:
        rank = self.ranks[sequence.rank]
        del rank.active[sequence.id]
        rank.pages -= sequence.pages
        sequence.rank = NOWHERE

    def _displace(self, sequence: Tracked) -> None:
        """Out of its rank, its node and their queues; all pages are free."""
        node = self.nodes[sequence.node]
        if sequence.rank >= 0:
            self._leave_rank(sequence)
        elif sequence.status is Status.PREFILLING:
            node.prefilling.remove(sequence.id)
        elif sequence.id in self.migrating:
            self.migrating.discard(sequence.id)
            self._expect(sequence.destination, -1, -sequence.pages)
        else:
            node.suspended.remove(sequence.id)
        node.used -= sequence.pages
        sequence.pages = 0
        sequence.node = sequence.destination = NOWHERE

    def _expect(self, node: int, sequences: int, pages: int) -> None:
        """Change what is on its way to a node."""
        self.nodes[node].incoming += sequences
        self.nodes[node].incoming_pages += pages
        self.nodes[node].used += pages
