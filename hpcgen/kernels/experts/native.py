"""Experts in C++ (`kernels/native/experts.cpp`): tokens sorted by expert, gate, up and activation in one pass."""

from ctypes import pointer

import torch

from hpcgen.kernels.experts.interface import ExpertWeights
from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.kernels.native.library import ACTIVATIONS, ExpertsCall, NativeLibrary, stored_weights, takes_weights

TOKENS_AT_ONCE = 4096
"""The running sums of so many tokens, 32 columns each, stay in the L2 cache."""


class NativeExperts:
    """Experts in bf16 on the CPU. What it does not take (fp32, plain weights) goes to torch."""

    name = "native"

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._fallback = TorchExperts()

    def forward(
        self, weights: ExpertWeights, hidden: torch.Tensor, top_index: torch.Tensor, top_weight: torch.Tensor
    ) -> torch.Tensor:
        if not _takes(weights, hidden):
            return self._fallback.forward(weights, hidden, top_index, top_weight)
        hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        top_index, top_weight = top_index.contiguous(), top_weight.float().contiguous()
        biases = [None if b is None else b.bfloat16().contiguous() for b in (weights.gate_up_bias, weights.down_bias)]
        out = hidden.new_empty(hidden.shape)
        for start in range(0, len(hidden), TOKENS_AT_ONCE):
            rows = slice(start, start + TOKENS_AT_ONCE)
            self._forward(weights, biases, hidden[rows], top_index[rows], top_weight[rows], out[rows])
        return out

    def _forward(
        self,
        weights: ExpertWeights,
        biases: list[torch.Tensor | None],
        hidden: torch.Tensor,
        top_index: torch.Tensor,
        top_weight: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        gate_up_bias, down_bias = biases
        gate_up, down = (stored_weights(w, weights.transposed) for w in (weights.gate_up, weights.down))
        call = ExpertsCall(
            hidden=hidden.data_ptr(),
            hidden_stride=hidden.stride(0),
            top_index=top_index.data_ptr(),
            top_weight=top_weight.data_ptr(),
            out=out.data_ptr(),
            tokens=len(hidden),
            top_k=top_index.shape[1],
            inner=gate_up.inner,
            intermediate=down.inner,
            gate_up=pointer(gate_up),
            down=pointer(down),
            gate_up_bias=None if gate_up_bias is None else gate_up_bias.data_ptr(),
            down_bias=None if down_bias is None else down_bias.data_ptr(),
            first=weights.first,
            count=weights.count,
            activation=ACTIVATIONS[weights.activation],
            interleaved=weights.interleaved,
            alpha=weights.alpha,
            limit=weights.limit,
        )
        self._library.experts(call)


def _takes(weights: ExpertWeights, hidden: torch.Tensor) -> bool:
    stored = all(takes_weights(weight, weights.transposed) for weight in (weights.gate_up, weights.down))
    return stored and hidden.dtype == torch.bfloat16 and hidden.device.type == "cpu"
