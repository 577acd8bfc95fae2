"""Rank 0 and the others between decisions: orders out, answers back.

Messages between two ranks each, so that a rank that is late or gone holds up nobody but rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcgen.cluster.waiting import receive, until
from hpcgen.cluster.world import World

_ORDER, _ANSWER = 1, 2


class Exchange:
    """One question at a time: `send`, then `answers`; on the other ranks `receive`, then `answer`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._missing: set[int] = set()

    def missing(self) -> str:
        """Which ranks have not answered, in words."""
        return f"no word from rank {', '.join(map(str, sorted(self._missing)))}" if self._missing else ""

    def send(self, orders: Mapping[int, Any]) -> None:
        """By rank 0: an order for each of the other ranks."""
        comm = self._world.comm
        assert comm is not None
        self._missing.clear()
        requests = [comm.isend(order, rank, _ORDER) for rank, order in orders.items()]
        for request in requests:
            until(request.Test)

    def send_away(self) -> None:
        """By rank 0: no order is to come. A rank that is gone need not hear it."""
        for rank in range(1, self._world.size):
            self._send_last(rank)

    def answers(self) -> Iterator[tuple[int, Any]]:
        """(rank, answer) of every other rank, as they come."""
        comm = self._world.comm
        assert comm is not None
        self._missing = set(range(1, comm.size))
        while self._missing:
            rank, answer = receive(comm, _ANSWER)
            self._missing.discard(rank)
            yield rank, answer

    def receive(self) -> Any:
        """By every other rank: the next order."""
        assert self._world.comm is not None
        return receive(self._world.comm, _ORDER, 0)

    def answer(self, answer: Any) -> None:
        comm = self._world.comm
        assert comm is not None
        until(comm.isend((comm.rank, answer), 0, _ANSWER).Test)

    def _send_last(self, rank: int) -> None:
        assert self._world.comm is not None
        try:
            until(self._world.comm.isend(None, rank, _ORDER).Test)
        except Exception as error:
            if not self._world.has_lost(error):
                raise
