"""Dispatch and combine of tokens between the ranks that own the experts (expert parallelism).

Shapes: T tokens of this rank, S tokens that came to it, D hidden, K experts a token, E experts.
"""

from typing import Any, NamedTuple, Protocol

import torch


class Dispatched(NamedTuple):
    """Tokens that have at least one expert on this rank; a token comes once, however many of its experts are here."""

    hidden: torch.Tensor
    """[S, D]"""
    top_index: torch.Tensor
    """int64 [S, K]: global expert numbers; slots of experts elsewhere hold any number outside this rank's range."""
    top_weight: torch.Tensor
    """[S, K]"""
    handle: Any
    """What `combine` needs to send results back; valid for one `combine`."""


class Dispatcher(Protocol):
    """Collective: all ranks of the group call it in the same order, a rank without tokens too (T = 0)."""

    name: str

    def dispatch(self, hidden: torch.Tensor, top_index: torch.Tensor, top_weight: torch.Tensor) -> Dispatched:
        """hidden [T, D], top_index int64 [T, K], top_weight [T, K] -> the tokens for this rank's experts."""

    def combine(self, out: torch.Tensor, handle: Any) -> torch.Tensor:
        """This rank's share of the outputs [S, D] -> their sums over all ranks [T, D], accumulated in fp32."""


def expert_range(rank: int, ranks: int, experts: int) -> tuple[int, int]:
    """(first, count) of the experts that `rank` owns: contiguous, the first `experts % ranks` ranks own one more."""
    share, extra = divmod(experts, ranks)
    return rank * share + min(rank, extra), share + (rank < extra)
