"""Whether saved KV is loaded or recomputed."""

from dataclasses import dataclass

from hpcgen.checkpoint.order import RecomputeCost, recompute_cost
from hpcgen.sequence import pages_for


@dataclass(frozen=True, slots=True)
class RestoreRates:
    """Measured rates of the job that restores."""

    load_bytes_per_second: float
    """From the checkpoint directory into the host store, one node."""
    prefill_tokens_per_second: float
    """Short prompts, one node."""


def loading_is_cheaper(tokens: int, page_bytes: int, rates: RestoreRates, cost: RecomputeCost = recompute_cost) -> bool:
    """Whether reading the pages of `tokens` tokens takes less time than a prefill of them."""
    load = pages_for(tokens) * page_bytes / rates.load_bytes_per_second
    return load < cost(tokens) / cost(1) / rates.prefill_tokens_per_second
