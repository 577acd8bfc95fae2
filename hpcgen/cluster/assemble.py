"""Puts one rank of an instance together: the pool of its node, its executor, its peers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any

from hpcgen.cluster.expert_parallel import ExpertParallelPeers, experts_of
from hpcgen.cluster.janitor import Janitor, mapped_shared_files
from hpcgen.cluster.migration import Migrations
from hpcgen.cluster.node_pool import NodePool, open_node_pool, room_for_pool
from hpcgen.cluster.open_dispatcher import open_dispatcher
from hpcgen.cluster.partition import PartitionedDecode, shard_of
from hpcgen.cluster.shard_memory import ShardMemory, plan_shard
from hpcgen.cluster.watchdog import Watchdog
from hpcgen.cluster.worker import Worker
from hpcgen.cluster.world import World
from hpcgen.coroutine.lifecycle import Lifecycle
from hpcgen.engine.build import EngineOptions, RankAssembly, build_rank, host_pages
from hpcgen.engine.stopping import StopMatcherFactory
from hpcgen.kernels.dispatch.interface import expert_range
from hpcgen.memory.host_store import HostStore
from hpcgen.model.causal import CausalModel
from hpcgen.model.expert_share import ExpertShare
from hpcgen.model.tensor_parallel import TensorParallelShard
from hpcgen.model.weight_file import WeightFile
from hpcgen.scheduler.plan import Limits


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How ranks work together."""

    migrate: bool = True
    """Whether sequences may move between nodes."""
    partition_below: int | None = None
    """So few sequences left, or fewer, are spread over the ranks (PARTITION); 0: never. None: fewer than ranks."""


@dataclass(slots=True)
class ClusterAssembly(RankAssembly):
    """One rank of an instance, and what it was put together from."""

    worker: Worker
    pool: NodePool
    janitor: Janitor | None
    """On the leader of a node."""
    world: World
    connect: Callable[[], dict[str, Any]]
    """Makes what depends on the other ranks. Collective."""

    def close(self) -> None:
        """Gives back what ranks hold together. Collective."""
        self.worker.close()

    def rebuild(self) -> None:
        """For the ranks that are left after a loss, when the world has regrouped. Collective.

        The host store stays as it is.
        """
        side_task = self.executor.side_task
        self.device.vacate()
        self.device.close()
        for name, part in self.connect().items():
            setattr(self, name, part)
        self.executor.side_task = side_task
        if self.world.is_leader and self.janitor is None:
            self.janitor = _janitor()


def build_cluster_rank(
    world: World,
    model: CausalModel,
    weights: WeightFile,
    options: EngineOptions,
    stop_matcher: StopMatcherFactory,
    watchdog: Watchdog,
    ranks: ClusterOptions,
    lifecycle: Lifecycle | None = None,
) -> ClusterAssembly:
    """Collective. Raises HpcgenError where the memory does not suffice."""
    assert world.comm is not None
    layout = model.kv_layout
    pool = open_node_pool(world, _common_pages(world, options, layout.page_bytes), layout.page_bytes)
    store = HostStore(layout, len(pool.buffer) // layout.page_bytes, pool.buffer, pool.free)
    pool.free.while_waiting = world.look_for_losses

    def connect() -> dict[str, Any]:
        return _connect(world, model, weights, options, stop_matcher, watchdog, ranks, store, pool, lifecycle)

    janitor = _janitor() if world.is_leader else None
    return ClusterAssembly(**connect(), pool=pool, janitor=janitor, world=world, connect=connect)


def _connect(
    world: World,
    model: CausalModel,
    weights: WeightFile,
    options: EngineOptions,
    stop_matcher: StopMatcherFactory,
    watchdog: Watchdog,
    ranks: ClusterOptions,
    store: HostStore,
    pool: NodePool,
    lifecycle: Lifecycle | None,
) -> dict[str, Any]:
    """What of a ClusterAssembly depends on the other ranks. Collective."""
    watchdog.know_node()
    experts, share = experts_of(model), None
    if experts is not None:
        share = ExpertShare(weights, model, *expert_range(world.rank, world.size, experts))
    rank = build_rank(model, weights, options, stop_matcher, store, lifecycle, decode_share=share)
    rank.executor.on_progress = lambda activity: watchdog.enter(activity.phase.value)
    shard = _shard_memory(world, rank, weights, options)
    if experts is not None:
        closing = ExitStack()
        dispatcher = open_dispatcher(world, model, experts, options.most_active, closing)
        rank.executor.peers = ExpertParallelPeers(
            world.own_comm(), model, rank.device, dispatcher, watchdog, closing.close
        )
    partition_below = world.size if ranks.partition_below is None else ranks.partition_below
    if shard is not None and partition_below:
        rank.executor.partition = PartitionedDecode(world.own_comm(), shard, store, rank.attention, rank.structured)
    migrations = Migrations(world, store) if ranks.migrate and world.nodes > 1 and world.calls_from_threads else None
    parts = {part.name: getattr(rank, part.name) for part in fields(rank)}
    parts["limits"] = replace(
        _common_limits(world, rank.limits, len(pool.free.retired)),
        migrate=migrations is not None,
        partition_below=partition_below,
        split_last=rank.executor.partition is not None,
    )
    return parts | {
        "worker": Worker(world.rank, rank.executor, store, pool.free, watchdog, migrations, mortal=world.survives)
    }


def _janitor() -> Janitor:
    janitor = Janitor()
    janitor.remove_at_end(mapped_shared_files())
    return janitor


def _shard_memory(world: World, rank: RankAssembly, weights: WeightFile, options: EngineOptions) -> ShardMemory | None:
    """Where this rank holds its shard in PARTITION; None on all ranks where the model cannot be divided among them, or
    some device has no room for its shard."""
    model, memory = rank.model, None
    part = shard_of(model, world.rank, world.size)
    directory, backend = options.tokenizer_directory, model.experts_backend
    if part is not None and directory is not None:

        def make() -> TensorParallelShard:
            own = CausalModel.build(directory, model.dtype, model.device, backend)
            return TensorParallelShard(own, world.rank, world.size)

        memory = plan_shard(rank, make, weights, options, part)
    return memory if all(world.gather_all(memory is not None)) else None


def _common_pages(world: World, options: EngineOptions, page_bytes: int) -> int:
    """Pages of the host store of every node: as many as the poorest one has room for."""
    wanted = host_pages(options, page_bytes)
    if options.host_memory is None:
        wanted = min(wanted, room_for_pool() // page_bytes)
    return min(world.gather_all(wanted))


def _common_limits(world: World, own: Limits, retired: int) -> Limits:
    """The scheduler has one number for all ranks and nodes: what the poorest has. `retired`: pages of no use here."""
    devices = [pages for pages in world.gather_all(own.device_pages) if pages is not None]
    host_pages = min(world.gather_all(own.host_pages - retired))
    return replace(own, host_pages=host_pages, device_pages=min(devices, default=None))
