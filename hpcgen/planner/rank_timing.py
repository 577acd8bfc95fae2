"""Times what ranks do with each other: tokens to experts and back, pages out of another rank's window, reductions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcgen.cluster.dispatch import AlltoallvDispatcher
from hpcgen.cluster.world import World
from hpcgen.planner import work
from hpcgen.planner.kernel_timing import Timing
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.roofline import Work

if TYPE_CHECKING:
    from mpi4py import MPI

TOKENS = (1, 8, 32, 128, 512)
"""Of each rank, in an exchange."""
WINDOW_BYTES = (1 << 12, 1 << 18, 1 << 22, 1 << 25)
REPEATS = 7


class RankTiming:
    """All methods are collective."""

    def __init__(self, world: World, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        """`world` has at least two ranks."""
        assert world.comm is not None
        self._world, self._shape, self._dtype, self._device = world, shape, dtype, device
        self._comm: MPI.Intracomm = world.comm

    def exchange(self, across_nodes: bool) -> list[Timing]:
        """Dispatch of so many tokens of each rank to evenly chosen experts; half of dispatch and combine together.

        Among the ranks of a node, or of all nodes. Nothing for a dense model, or where there is nobody to send to.
        """
        comm = self._comm if across_nodes else self._world.node
        if not self._shape.experts or comm is None or comm.size < 2:
            return []
        places = self._world.nodes if across_nodes else comm.size
        dispatcher = AlltoallvDispatcher(comm, self._shape.experts)
        timings = []
        for tokens in TOKENS:
            hidden = torch.zeros(tokens, self._shape.hidden, dtype=self._dtype, device=self._device)
            index = torch.rand(tokens, self._shape.experts).topk(self._shape.experts_per_token).indices
            weight = torch.ones(index.shape)

            def both_ways(hidden=hidden, index=index, weight=weight) -> None:  # type: ignore[no-untyped-def]
                came = dispatcher.dispatch(hidden, index, weight)
                dispatcher.combine(came.hidden, came.handle)

            nbytes = work.dispatched_bytes(self._shape, tokens, places)
            timings.append(Timing(Work(0.0, nbytes), self._seconds(both_ways) / 2))
        return timings

    def window(self) -> list[Timing]:
        """Reads out of the next rank's window, or the next node's, by all ranks at once."""
        from mpi4py import MPI

        memory = np.zeros(max(WINDOW_BYTES), dtype=np.uint8)
        target = np.ones(max(WINDOW_BYTES), dtype=np.uint8)
        world = self._world
        neighbour = (world.rank + 1) % world.size
        if world.nodes > 1:
            neighbour = world.leader_of((world.node_index + 1) % world.nodes)
        window = MPI.Win.Create(memory, 1, comm=self._comm)
        window.Lock_all(MPI.MODE_NOCHECK)
        timings = []
        for nbytes in WINDOW_BYTES:

            def read(nbytes: int = nbytes) -> None:
                window.Rget([target[:nbytes], MPI.BYTE], neighbour, (0, nbytes, MPI.BYTE)).Wait()
                self._comm.Barrier()  # keeps the target inside of MPI, which moves data only then

            timings.append(Timing(Work(0.0, nbytes), self._seconds(read)))
        window.Unlock_all()
        window.Free()
        return timings

    def reduction(self) -> float:
        """Seconds until all ranks have the sum of a number: what a step of spread experts begins with."""
        one, total = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        return self._seconds(lambda: self._comm.Allreduce(one, total))

    def _seconds(self, call: Callable[[], object]) -> float:
        """Median of the repeats on this rank, as the mean of all ranks."""
        call()
        taken = []
        for _ in range(REPEATS):
            self._comm.Barrier()
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
        return statistics.fmean(self._world.gather_all(statistics.median(taken)))
