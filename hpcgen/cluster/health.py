"""How the ranks are, from what they report with every outcome; and which of them the others suffer from."""

from statistics import median
from typing import NamedTuple

from hpcgen.cluster.messages import Health
from hpcgen.cluster.world import World

WINDOW = 60.0
"""Seconds over which ranks are compared."""
LITTLE_MEMORY = 512 * 2**20
"""Bytes left on a node below which the kernel may soon kill a rank."""


class RankHealth(NamedTuple):
    """Of one rank, over some seconds."""

    rank: int
    waiting: float
    """Share of the time in which it waited for others."""
    resident: int
    """Bytes of memory that it has."""
    available: int
    """Bytes of memory that its node has left."""


class HealthRecord:
    """Of all ranks, since the last `look`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: set[str] = set()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Ranks have other numbers, or the window is over."""
        self._seconds, self._waited = [0.0] * self._world.size, [0.0] * self._world.size
        self._last: dict[int, Health] = {}

    def add(self, rank: int, health: Health) -> None:
        self._seconds[rank] += health.seconds
        self._waited[rank] += health.waited
        self._last[rank] = health

    def ranks(self) -> list[RankHealth]:
        """Those that have reported, in their order."""
        return [
            RankHealth(rank, self._waiting(rank), health.resident, health.available)
            for rank, health in sorted(self._last.items())
        ]

    def troubles(self) -> list[str]:
        """What a user should know, each once."""
        found = []
        for rank, health in self._last.items():
            host = self._world.hosts[self._world.node_of_rank[rank]]
            if 0 < health.available < LITTLE_MEMORY:
                found.append(f"{host} has little memory left: lower --host-memory before the kernel ends a rank")
        if max(self._seconds) > WINDOW:
            shares = [self._waiting(rank) for rank in range(self._world.size)]
            for rank, share in enumerate(shares):
                if share < 0.05 and median(shares[:rank] + shares[rank + 1 :]) > 0.5:
                    host = self._world.hosts[self._world.node_of_rank[rank]]
                    found.append(f"rank {rank} on {host} is slow: the others wait for it most of the time")
            self.begin_anew()
        new = [trouble for trouble in dict.fromkeys(found) if trouble not in self._told]
        self._told.update(new)
        return new

    def _waiting(self, rank: int) -> float:
        return self._waited[rank] / self._seconds[rank] if self._seconds[rank] else 0.0
