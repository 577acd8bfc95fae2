"""What befalls a simulated batch, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpcgen.planner.timeline import Span


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that dies, alone or with its whole node."""

    seconds: float
    rank: int
    node_lost: bool = False


@dataclass(frozen=True, slots=True)
class Preemption:
    """The whole instance is stopped and goes on later, on as many ranks; a checkpoint is written in the grace time."""

    seconds: float
    away: float
    """Seconds until it runs again."""
    grace: float = 60.0


@dataclass(slots=True)
class Outcome:
    """What a simulated batch came to. Times in seconds since its start."""

    finish: NDArray[np.float64]
    """When each sequence finished; NaN for one that can never fit."""
    seconds: float = 0.0
    """Batch completion time."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    busy: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Seconds that each rank computed."""
    busy_in_phase: dict[str, float] = field(default_factory=dict)
    """The same by phase, of all ranks together."""
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    migrations: int = 0
    discards: int = 0
    decisions: int = 0
    spans: list[Span] = field(default_factory=list)
