"""Experts of a sparse MoE layer: their weights as a backend sees them, and what a backend does.

Shapes: T tokens, D hidden, E experts, K experts a token, I intermediate.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hpcgen.kernels.layouts import StoredTensor


@dataclass(frozen=True)
class ExpertWeights:
    """Experts [first, first + count) of one layer; a rank of an expert-parallel decode holds only its own."""

    gate_up: StoredTensor
    """Logical shape [E, 2I, D] (`transposed`: [E, D, 2I]); gate rows before up rows, or interleaved."""
    down: StoredTensor
    """Logical shape [E, D, I] (`transposed`: [E, I, D])."""
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    transposed: bool
    interleaved: bool
    """gate and up alternate in the last dimension of gate_up (GPT-OSS)."""
    activation: Literal["silu", "gelu_tanh", "gelu", "swiglu_oai"]
    """`act(gate) * up`; 'swiglu_oai' is GPT-OSS's clamped (up + 1) * gate * sigmoid(alpha * gate)."""
    alpha: float = 1.702
    limit: float = 7.0
    first: int = 0

    @property
    def count(self) -> int:
        return self.gate_up.shape[0]


class ExpertsBackend(Protocol):
    name: str

    def forward(
        self, weights: ExpertWeights, hidden: torch.Tensor, top_index: torch.Tensor, top_weight: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, D], top_index int64 [T, K] (global expert numbers), top_weight [T, K] -> [T, D].

        Slots whose expert is not in [first, first + count) contribute nothing.
        """
