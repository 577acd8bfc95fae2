"""A first-in-first-out queue of sequences whose ids are their order of arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator


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

    def remove_all(self, sequences: Iterable[int]) -> None:
        self._members.difference_update(sequences)

    def oldest_first(self) -> Iterator[int]:
        """The members of now, in order, but for those that leave before their turn."""
        self.first()
        members, last = self._members, None
        ordered: Iterator[int] = reversed(self._ordered)
        if self._late:
            ordered = heapq.merge(ordered, sorted(self._late))
        for index in ordered:
            if index in members and index != last:  # one that left and came back may be in both
                last = index
                yield index

    def first(self) -> int | None:
        """The oldest member, None of an empty queue."""
        members, ordered, late = self._members, self._ordered, self._late
        if not members:
            return None
        while ordered and ordered[-1] not in members:
            ordered.pop()
        if late is None or not ordered or len(late) > 2 * len(members) + 64:
            self._late = []
            ordered = self._ordered = sorted(members, reverse=True)
            return ordered[-1] if ordered else None
        while late and late[0] not in members:
            heapq.heappop(late)
        return late[0] if late and late[0] < ordered[-1] else ordered[-1]
