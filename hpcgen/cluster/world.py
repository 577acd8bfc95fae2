"""The ranks of an instance: who is where, which cores each computes on, and how all of them end.

A process without a launcher is a world of its own, and then MPI is never imported.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hpcgen.cluster.ending import end_all
from hpcgen.cluster.errors import ClusterError
from hpcgen.cluster.launcher import check_world_size, launch_of, outlives_ranks
from hpcgen.cluster.waiting import wait

if TYPE_CHECKING:
    from mpi4py import MPI

NODE_NAME = "HPCGEN_NODE"
"""Environment variable that puts ranks of one host on nodes of different names, to rehearse several nodes on one."""


class Regrouping(NamedTuple):
    """What became of ranks and nodes when some were lost."""

    ranks: tuple[int, ...]
    """For each rank of now, the one it was."""
    node_of_rank: tuple[int, ...]
    """As it was."""
    nodes: tuple[int | None, ...]
    """For each node of before, the one it is now; None where all its ranks are gone."""
    lost: tuple[str, ...]
    """The ranks that are gone, as they are called in messages."""


@dataclass(slots=True)
class World:
    """The place of this process among the ranks. `comm` and `node` are None in a world of one process."""

    rank: int = 0
    node_of_rank: tuple[int, ...] = (0,)
    """Nodes are numbered in the order of their first rank."""
    comm: MPI.Intracomm | None = None
    node: MPI.Intracomm | None = None
    """The ranks of this node, in the order of their world ranks."""
    hosts: tuple[str, ...] = field(default_factory=lambda: (socket.gethostname(),))
    """Name of each node."""
    others_ended: bool = False
    """Whether the other ranks have been told to end: then an exception is this rank's alone."""
    survives: bool = False
    """Whether the others can go on when a rank dies (MPI's user-level failure mitigation, ULFM)."""
    _in_use: list[MPI.Intracomm] = field(default_factory=list)
    """All communicators in which ranks may wait for each other."""

    @property
    def size(self) -> int:
        return len(self.node_of_rank)

    @property
    def nodes(self) -> int:
        return len(self.hosts)

    @property
    def node_index(self) -> int:
        return self.node_of_rank[self.rank]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """World ranks of this node."""
        return tuple(rank for rank, node in enumerate(self.node_of_rank) if node == self.node_index)

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0

    def leader_of(self, node: int) -> int:
        """World rank of a node's first rank."""
        return self.node_of_rank.index(node)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that schedules."""
        return self.rank == 0

    @property
    def calls_from_threads(self) -> bool:
        """Whether MPI may be called from any thread, as MIGRATE does."""
        from mpi4py import MPI

        return MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def wait_for_all(self) -> None:
        """Returns when every rank has called it. Waits asleep, so that a rank that works has the cores."""
        if self.comm is not None:
            wait(self.comm.Ibarrier())

    def own_comm(self) -> MPI.Intracomm:
        """A communicator of all ranks for one purpose. Collective."""
        assert self.comm is not None
        self._in_use.append(self.comm.Dup())
        return self._in_use[-1]

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's `value` on every rank. In a world of one, `value`."""
        return value if self.comm is None else self.comm.bcast(value)

    def node_broadcast(self, value: Any = None) -> Any:
        """The node leader's `value` on every rank of its node."""
        return value if self.node is None else self.node.bcast(value)

    def gather_all(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        return [value] if self.comm is None else self.comm.allgather(value)

    def has_lost(self, error: BaseException) -> bool:
        """Whether `error` is MPI's word that a rank is gone, and the others can go on: then all of them `regroup`."""
        if not self.survives:
            return False
        from mpi4py import MPI

        gone = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
        if not isinstance(error, MPI.Exception):
            return False
        assert self.comm is not None
        return error.error_class in gone or self.comm.Is_revoked() or self.comm.Get_failed().size > 0

    def look_for_losses(self) -> None:
        """Raises what `has_lost` tells of where a rank is gone. For whoever waits for others without MPI."""
        if self.survives and self.comm is not None:
            self.comm.iprobe()

    def regroup(self) -> Regrouping:
        """After a loss: this is the world of those that are left, numbered anew. Collective over them.

        What `own_comm` gave before is of no use any more.
        """
        from mpi4py import MPI

        old = self.comm
        assert old is not None
        for comm in (old, *self._in_use):
            comm.Revoke()
        while True:
            comm = cast("MPI.Intracomm", old.Shrink())
            before = MPI.Group.Translate_ranks(comm.group, None, old.group)
            nodes = [self.node_of_rank[rank] for rank in before]
            node, complete = None, True
            try:
                node = cast("MPI.Intracomm", comm.Split(nodes[comm.rank], comm.rank))
            except MPI.Exception:
                comm.Revoke()
                complete = False
            # Who dies meanwhile is not missed by some and met by others: all agree, or all begin anew.
            old.Ack_failed(old.Get_failed().size)
            try:
                complete = bool(old.Agree(int(complete)))
            except MPI.Exception:
                complete = False
            if complete:
                break
        order = sorted(set(nodes), key=nodes.index)
        renumbered = tuple(order.index(index) if index in order else None for index in range(self.nodes))
        gone = sorted(set(range(self.size)) - set(before))
        lost = tuple(f"rank {rank} on {self.hosts[self.node_of_rank[rank]]}" for rank in gone)
        regrouping = Regrouping(tuple(before), self.node_of_rank, renumbered, lost)
        self.hosts = tuple(self.hosts[index] for index in order)
        self.node_of_rank = tuple(order.index(index) for index in nodes)
        self.rank, self.comm, self.node = comm.rank, comm, node
        self._in_use = [node] if node is not None else []
        return regrouping

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {self.hosts[self.node_index]}"


def cores_of_local_rank(cores: Sequence[int], local_rank: int, local_ranks: int) -> list[int]:
    """This rank's part of the cores that the ranks of a node share; at least one."""
    if local_ranks >= len(cores):
        return [cores[local_rank % len(cores)]]
    start, stop = (local_rank * len(cores) // local_ranks, (local_rank + 1) * len(cores) // local_ranks)
    return list(cores[start:stop])


def threads_per_rank(world: World, wanted: int | None = None) -> int:
    """CPU threads that this rank computes with: `wanted`, or its part of the cores that the launcher gave it.

    Collective. Ranks that the launcher bound to cores of their own keep all of them.
    """
    if wanted is not None:
        return wanted
    own = sorted(os.sched_getaffinity(0))
    if world.node is None:
        return len(own)
    sharing = [rank for rank, cores in enumerate(world.node.allgather(own)) if cores == own]
    return len(cores_of_local_rank(own, sharing.index(world.node.rank), len(sharing)))


def device_of_rank(world: World, device: str, devices: int) -> str:
    """The device of this rank: 'cuda' becomes the one of its local rank, where several of `devices` are visible."""
    if device != "cuda" or world.size == 1 or devices <= 1:
        return device
    return f"cuda:{world.local_rank % devices}"


@contextmanager
def open_world(environment: Mapping[str, str] = os.environ) -> Iterator[World]:
    """The world of this process. An exception that leaves the block ends all ranks, after its message.

    Raises ClusterError where MPI and the launcher do not agree, or where there is a launcher and no MPI.
    """
    launch = launch_of(environment)
    if launch is None or launch.size == 1:
        yield World()
        return
    try:
        import mpi4py

        # Where ranks may die, MPI_Finalize may wait for one that did so in the same moment.
        if outlives_ranks(environment):
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ClusterError(
            f"{launch.launcher} started {launch.size} ranks, but MPI cannot be used here ({error}). Install it with "
            "pip install 'hpcgen[mpi]', or load the site's MPI and install mpi4py."
        ) from None
    problem = check_world_size(launch, MPI.COMM_WORLD.size, MPI.Get_library_version().split("\n")[0].strip("\0\t "))
    if problem is not None:
        # All of these ranks would say so: one is enough.
        raise ClusterError(problem if launch.rank == 0 else "see the message of rank 0")
    world = _world(MPI, environment)
    try:
        yield world
    except BaseException as error:
        if not world.others_ended:
            end_all(world, _LOST_TOO_EARLY if world.has_lost(error) else error)
        _part(world)
        raise
    _part(world)


_LOST_TOO_EARLY = ClusterError(
    "another rank is gone, at a time when the others cannot go on without it: what is finished is kept, and the same "
    "command continues"
)


def _part(world: World) -> None:
    """Every rank has done its work; one that is gone by now is not missed."""
    try:
        world.wait_for_all()
    except Exception as error:
        if not world.has_lost(error):
            raise


def _world(mpi: Any, environment: Mapping[str, str]) -> World:
    node_name = environment.get(NODE_NAME)
    comm = mpi.COMM_WORLD.Dup()
    shared = comm.Split_type(mpi.COMM_TYPE_SHARED, comm.rank)
    names = shared.allgather(node_name)
    node = shared.Split(names.index(node_name), comm.rank)
    leaders = comm.allgather((node.bcast(comm.rank), node_name or mpi.Get_processor_name()))
    order = sorted({leader for leader, _ in leaders})
    hosts = tuple(leaders[leader][1] for leader in order)
    node_of_rank = tuple(order.index(leader) for leader, _ in leaders)
    return World(comm.rank, node_of_rank, comm, node, hosts, survives=outlives_ranks(environment), _in_use=[node])
