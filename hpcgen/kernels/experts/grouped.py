"""Experts by torch's grouped matrix product: all experts in two calls, for CUDA (and any device that has it)."""

import torch
from torch.nn import functional

from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.experts.interface import ExpertWeights
from hpcgen.kernels.experts.torch_reference import TorchExperts, activate

TOKENS_AT_ONCE = 8192
"""A part of the tokens at a time: rows that are K times as many, and wider, exist only for it."""


class GroupedExperts:
    """Experts in bf16. No value comes back from the device, so that the host can run ahead.

    Quantised weights go to the reference: it holds one expert at a time in bf16, not all of them.
    """

    name = "grouped"

    def __init__(self) -> None:
        self._reference = TorchExperts()

    def forward(
        self, weights: ExpertWeights, hidden: torch.Tensor, top_index: torch.Tensor, top_weight: torch.Tensor
    ) -> torch.Tensor:
        if weights.gate_up.scale is not None or hidden.dtype != torch.bfloat16 or not top_index.numel():
            return self._reference.forward(weights, hidden, top_index, top_weight)
        gate_up, down = (dequantize(w, hidden.dtype) for w in (weights.gate_up, weights.down))
        if not weights.transposed:
            gate_up, down = gate_up.mT, down.mT
        operands = zip(*(part.split(TOKENS_AT_ONCE) for part in (hidden, top_index, top_weight)), strict=True)
        return torch.cat([_of_part(weights, gate_up, down, *part) for part in operands])


def _of_part(
    weights: ExpertWeights,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    hidden: torch.Tensor,
    top_index: torch.Tensor,
    top_weight: torch.Tensor,
) -> torch.Tensor:
    local = top_index.flatten() - weights.first
    # Slots of experts elsewhere come last, in no group.
    local = torch.where((local >= 0) & (local < weights.count), local, weights.count)
    expert, slot = local.sort(stable=True)
    token = slot // top_index.shape[1]
    ends = torch.searchsorted(expert, torch.arange(weights.count, device=hidden.device), right=True).int()
    row_expert = expert.clamp(max=weights.count - 1)
    product = functional.grouped_mm(hidden[token], gate_up, offs=ends)
    if weights.gate_up_bias is not None:
        product = product + weights.gate_up_bias[row_expert]
    out = functional.grouped_mm(activate(weights, product).to(hidden.dtype), down, offs=ends)
    if weights.down_bias is not None:
        out = out + weights.down_bias[row_expert]
    # Rows in no group were never written: they may hold NaN, which a weight of 0 does not hide.
    weighted = out.float() * top_weight.flatten()[slot, None].float()
    weighted = weighted.masked_fill((expert == weights.count)[:, None], 0.0)
    sums = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return sums.index_add_(0, token, weighted).to(hidden.dtype)
