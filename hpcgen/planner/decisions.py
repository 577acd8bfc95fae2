"""Cost decisions of a running instance, by the same models as the plan: migrate, load or recompute."""

from __future__ import annotations

import math
from enum import Enum

from hpcgen.planner.costs import Costs


class Source(Enum):
    """Where the KV of a sequence is had from."""

    MIGRATE = "migrate"
    LOAD = "load"
    RECOMPUTE = "recompute"


def cheapest_source(costs: Costs, tokens: int, migrate: bool, load: bool) -> Source:
    """How a node gets the KV of `tokens` tokens soonest; whether another node, or a checkpoint, has it at all."""
    seconds = {Source.RECOMPUTE: costs.recompute_seconds(tokens)}
    if migrate:
        seconds[Source.MIGRATE] = costs.migrate_seconds(tokens)
    if load:
        seconds[Source.LOAD] = costs.load_seconds(tokens)
    return min(seconds, key=seconds.__getitem__)


def refill_share(switch_seconds: float, step_seconds: float, output_tokens: float) -> float:
    """Share of the full batch below which decode gives way to a prefill phase.

    A batch that runs down by a share x of itself takes about x `output_tokens` steps for it; of the `step_seconds` that
    a step takes however small its batch, x / 2 are wasted on the mean. What that and the switch cost a sequence that
    comes in, switch / x + step output x / 2, is least at x = sqrt(2 switch / (step output)).
    """
    if step_seconds <= 0 or output_tokens <= 0:
        return 0.0
    return max(1 - math.sqrt(2 * switch_seconds / (step_seconds * output_tokens)), 0.0)


def recompute_seconds_per_byte(costs: Costs, tokens: int) -> float:
    """What a byte of KV saves when it is in a checkpoint: the order in which a short grace time is best spent."""
    return costs.recompute_seconds(tokens) / max(tokens * costs.shape.kv_token_bytes, 1.0)
