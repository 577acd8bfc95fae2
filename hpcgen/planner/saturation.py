"""How large an instance should be: more ranks hold more, but exchange more and each read fewer experts' weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from hpcgen.planner.costs import Costs
from hpcgen.planner.errors import PlanError
from hpcgen.planner.search import Choice, Memory, choose
from hpcgen.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Size:
    """An instance size, and what each of its ranks yields on a workload that grows with it."""

    ranks: int
    choice: Choice

    @property
    def tokens_per_rank(self) -> float:
        """Output tokens per second and rank with full batches."""
        return self.choice.estimate.decode_rate / self.ranks


def instance_sizes(
    costs: Costs, ranks_per_node: int, memory: Memory, workload: Workload, most_ranks: int
) -> list[Size]:
    """Every power of two of ranks (whole nodes above one) that the model fits; the workload is scaled along."""
    sizes = []
    per_rank = max(len(workload) // most_ranks, 64)
    ranks = 1
    while ranks <= most_ranks:
        try:
            load = workload.sized(per_rank * ranks)
            sizes.append(Size(ranks, choose(costs, ranks, ranks_per_node, memory, load)))
        except PlanError as error:
            reason = error
        ranks *= 2
    if not sizes:
        raise reason
    return sizes


def completion_by_nodes(
    costs: Costs, ranks_per_node: int, memory: Memory, workload: Workload, most: int = 16
) -> dict[int, float]:
    """Completion time of the workload on 1, 2, 4, ... nodes; without those that it does not fit."""
    seconds = {}
    nodes = 1
    while nodes <= most:
        with contextlib.suppress(PlanError):
            seconds[nodes] = choose(costs, nodes * ranks_per_node, ranks_per_node, memory, workload).estimate.seconds
        nodes *= 2
    return seconds


def least_ranks(costs: Costs, ranks_per_node: int, memory: Memory, workload: Workload, most: int = 4096) -> int | None:
    """The smallest power of two of ranks that can run it; None when not even `most` can."""
    ranks = 1
    while ranks <= most:
        with contextlib.suppress(PlanError):
            choose(costs, ranks, ranks_per_node, memory, workload)
            return ranks
        ranks *= 2
    return None


def saturated(sizes: Sequence[Size], tolerance: float = 0.02) -> Size:
    """The smallest instance whose ranks yield within `tolerance` of the best: beyond it, run more instances."""
    best = max(size.tokens_per_rank for size in sizes)
    return next(size for size in sizes if size.tokens_per_rank >= (1 - tolerance) * best)
