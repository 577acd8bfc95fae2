"""The most sequences of a workload that finish within a limit, and the configuration for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpcgen.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class WithinLimit:
    """Result of the search: how many sequences, and when the last of them ends."""

    sequences: int
    seconds: float


def most_within(limit: float, workload: Workload, completion: Callable[[Workload], float], most: int) -> WithinLimit:
    """The largest batch drawn from the workload's lengths whose completion time is within `limit` seconds.

    By doubling and halving, to 1%; `completion` is taken to grow with the batch. 0 sequences when not even one is.
    """
    fitting, seconds = 0, 0.0
    count = 1
    while count <= most:
        needed = completion(workload.sized(count))
        if needed > limit:
            break
        fitting, seconds = count, needed
        count *= 2
    low, high = fitting, min(count, most + 1)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        needed = completion(workload.sized(middle))
        if needed <= limit:
            low, fitting, seconds = middle, middle, needed
        else:
            high = middle
    return WithinLimit(fitting, seconds)
