"""Experts in plain torch, one at a time: what the other backends are measured against."""

import torch
from torch.nn import functional

from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.experts.interface import ExpertWeights
from hpcgen.kernels.linear import plain_linear


class TorchExperts:
    """Experts on any device, in the dtype of `hidden`; activation and weighted sum in fp32."""

    name = "torch"

    def forward(
        self, weights: ExpertWeights, hidden: torch.Tensor, top_index: torch.Tensor, top_weight: torch.Tensor
    ) -> torch.Tensor:
        out_TD = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        local_TK = top_index - weights.first
        local_TK = torch.where((local_TK >= 0) & (local_TK < weights.count), local_TK, -1)
        for expert in local_TK.unique().tolist():
            if expert < 0:
                continue
            token, slot = (local_TK == expert).nonzero(as_tuple=True)
            expert_out = forward_expert(weights, expert, hidden[token])
            out_TD.index_add_(0, token, expert_out.float() * top_weight[token, slot, None].float())
        return out_TD.to(hidden.dtype)


def forward_expert(weights: ExpertWeights, expert: int, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [t, D] through the local expert `expert` -> [t, D]."""
    gate_up = dequantize(weights.gate_up, hidden.dtype, expert)
    down = dequantize(weights.down, hidden.dtype, expert)
    if weights.transposed:
        gate_up, down = gate_up.mT, down.mT
    gate_up_bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert].to(hidden.dtype)
    down_bias = None if weights.down_bias is None else weights.down_bias[expert].to(hidden.dtype)
    gated = activate(weights, plain_linear(hidden, gate_up, gate_up_bias))
    return plain_linear(gated.to(hidden.dtype), down, down_bias)


def activate(weights: ExpertWeights, gate_up: torch.Tensor) -> torch.Tensor:
    """[t, 2I] -> fp32 [t, I]."""
    gate_up = gate_up.float()
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if weights.interleaved else gate_up.chunk(2, -1)
    if weights.activation == "silu":
        return functional.silu(gate) * up
    if weights.activation == "gelu":
        return functional.gelu(gate) * up
    if weights.activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=weights.limit), up.clamp(-weights.limit, weights.limit)
    return (up + 1) * gate * torch.sigmoid(weights.alpha * gate)
