"""Rank 0's books: the truth of every unfinished sequence, the rank that works on it, and whose pages are whose.

They are as of the last reports. What a rank does until its next report changes no page that is in them, but for what
its order tells it to discard: so they hold when it does not come to that report.
"""

from hpcgen.cluster.messages import Arrival, Departure, Order, Outcome, SequenceState, apply_change
from hpcgen.cluster.migration import patience
from hpcgen.cluster.world import Regrouping, World
from hpcgen.scheduler.plan import Migration, Plan, RankPlan
from hpcgen.sequence import PAGE_TOKENS, Sequence, Status


class Ledger:
    """Turns plans into orders for ranks, and takes in what they did."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.sequences: dict[int, Sequence] = {}
        self._holder: dict[int, int] = {}
        """Rank that has the newest state of a sequence, beside rank 0."""
        self._kept: dict[int, int] = {}
        """Node that has the KV of a sequence which no rank works on."""
        self._source: dict[int, int] = {}
        """Node that a sequence on its way by MIGRATE comes from."""
        self._leaving: dict[int, list[int]] = {}
        """Pages at the source of cancelled sequences that are on their way."""
        self._discarded: list[int] = []
        """Sequences whose KV the orders that are being carried out give up."""
        self._unowned: list[tuple[int, list[int]]] = []
        """(node, pages) to be released with the next orders."""
        self._cancelled: list[tuple[int, int]] = []
        """(rank, sequence) to be dropped with the next orders."""

    def add(self, sequence: Sequence, node: int | None) -> None:
        """Takes a sequence; the KV of one that has some is in the host store of `node`."""
        self.sequences[sequence.id] = sequence
        if node is not None:
            self._kept[sequence.id] = node

    def node_of(self, key: int) -> int | None:
        """The node whose host store has the sequence's KV; None where it has none."""
        if key in self._source:
            return self._source[key]
        holder = self._holder.get(key)
        return self._kept.get(key) if holder is None else self._world.node_of_rank[holder]

    def cancel(self, key: int) -> Sequence:
        """Forgets an unfinished sequence, and sees to it that its rank drops it."""
        sequence = self.sequences.pop(key)
        holder = self._holder.pop(key, None)
        if holder is not None:
            self._cancelled.append((holder, key))
        elif key in self._source:
            self._leaving[key] = sequence.pages
        elif (node := self._kept.pop(key, None)) is not None:
            self._unowned.append((node, sequence.pages))
        return sequence

    def orders(self, plan: Plan, prefill_seconds: float) -> list[Order]:
        """What every rank is to do for a plan. `prefill_seconds`: of a token, as far as is known."""
        orders = [Order(plan.phase, part, plan.steps, plan.partition) for part in plan.ranks]
        for rank, order in enumerate(orders):
            for key in _needed(order.part):
                self._hand_over(key, rank, orders)
        for migration in plan.migrations:
            self._migrate(migration, orders, prefill_seconds)
        for node, pages in self._unowned:
            orders[self._world.leader_of(node)].release += pages
        for rank, key in self._cancelled:
            orders[rank].cancel.append(key)
        self._unowned.clear()
        self._cancelled.clear()
        self._discarded = [key for part in plan.ranks for key in part.discard]
        return orders

    def take(self, rank: int, outcome: Outcome) -> list[Sequence]:
        """What a rank did; gives the sequences that ended on it."""
        for change in outcome.changes:
            apply_change(self.sequences[change.id], change)
        ended = []
        for ending in outcome.endings:
            sequence = self.sequences[ending.id]
            sequence.finish_reason, sequence.text, sequence.error = ending.finish_reason, ending.text, ending.error
            ended.append(sequence)
        for key, pages in outcome.moved:
            if key in self._leaving:
                self._unowned.append((self._world.node_of_rank[rank], pages))
            self._end_migration(key, self._world.node_of_rank[rank], pages)
        for key in outcome.report.returned:
            if key in self._leaving:
                self._end_migration(key, None, [])
            else:
                self._kept[key] = self._source.pop(key)
        for key in outcome.report.lost:
            self._end_migration(key, None, [])
            if (lost := self.sequences.get(key)) is not None:
                lost.kv_length, lost.status = 0, Status.WAITING
        for key in outcome.report.finished:
            del self.sequences[key], self._holder[key]
        return ended

    def after_loss(self, regrouping: Regrouping, whole: bool) -> None:
        """Some ranks are gone and nobody works on anything: what they had is the nodes', as far as those are left.

        Args:
            whole: whether host stores have all KV of what dead ranks worked on; else they have filled pages.
        """
        kept: dict[int, int] = {}
        for key, sequence in self.sequences.items():
            holder = self._holder.get(key)
            was = self._source.get(key, self._kept.get(key)) if holder is None else regrouping.node_of_rank[holder]
            node = None if was is None or key in self._discarded else regrouping.nodes[was]
            if node is None:
                sequence.kv_length = 0
            elif holder is not None and holder not in regrouping.ranks and not whole:
                sequence.kv_length -= sequence.kv_length % PAGE_TOKENS
            if node is None or not sequence.kv_length:
                sequence.pages, sequence.status = [], Status.WAITING
                continue
            kept[key] = node
            complete = sequence.kv_length >= sequence.prefill_target
            sequence.status = Status.SUSPENDED if complete else Status.PREFILLING
        for past in (self._holder, self._source, self._leaving, self._discarded, self._unowned, self._cancelled):
            past.clear()
        self._kept = kept

    def withdraw(self) -> list[tuple[Sequence, int | None]]:
        """After a loss: all sequences, oldest first, with the nodes that have their KV; the books are empty then."""
        held = [(sequence, self._kept.get(key)) for key, sequence in sorted(self.sequences.items())]
        self.sequences.clear()
        self._kept.clear()
        return held

    def owned(self, node: int) -> list[int]:
        """Pages of a node that belong to a sequence, where no rank works on any."""
        return [page for key, at in self._kept.items() if at == node for page in self.sequences[key].pages]

    def _migrate(self, migration: Migration, orders: list[Order], prefill_seconds: float) -> None:
        source, destination = self._world.leader_of(migration.source), self._world.leader_of(migration.destination)
        sequence = self.sequences[migration.sequence]
        self._take_from_holder(sequence.id, orders)
        self._kept.pop(sequence.id, None)
        self._source[sequence.id] = migration.source
        orders[source].departures.append(Departure(sequence.id, destination, sequence.pages))
        time = patience(sequence.kv_length, prefill_seconds)
        orders[destination].arrivals.append(Arrival(SequenceState.of(sequence), source, time))

    def _end_migration(self, key: int, node: int | None, pages: list[int]) -> None:
        """The pages at its source are nobody's; the sequence has others on `node`, or none."""
        source = self._source.pop(key)
        if key in self._leaving:
            self._unowned.append((source, self._leaving.pop(key)))
            return
        sequence = self.sequences[key]
        self._unowned.append((source, sequence.pages))
        sequence.pages = pages
        if node is not None:
            self._kept[key] = node

    def _take_from_holder(self, key: int, orders: list[Order]) -> None:
        holder = self._holder.pop(key, None)
        if holder is not None:
            orders[holder].forget.append(key)

    def _hand_over(self, key: int, rank: int, orders: list[Order]) -> None:
        """Sees to it that `rank` has the newest state of a sequence."""
        if self._holder.get(key) == rank:
            return
        self._take_from_holder(key, orders)
        self._holder[key] = rank
        self._kept.pop(key, None)
        orders[rank].take_over.append(SequenceState.of(self.sequences[key]))


def _needed(part: RankPlan) -> list[int]:
    """Sequences whose state a rank needs for its part of a plan."""
    return [*part.discard, *part.suspend, *part.resume, *part.chunks.sequences]
