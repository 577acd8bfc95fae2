"""Linear modules whose weight is stored packed or quantised: their `forward` reads the stored form."""

import torch
from torch import nn
from torch.nn import functional

from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.layouts import StoredTensor


class StoredLinear:
    """The `forward` of an nn.Linear whose weight is a `StoredTensor`; the module's own weight stays on meta."""

    __slots__ = ("bias", "stored")

    def __init__(self, stored: StoredTensor, bias: torch.Tensor | None) -> None:
        self.stored = stored
        self.bias = bias

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        return functional.linear(input, dequantize(self.stored, input.dtype), self.bias)


def dense_weight(linear: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] as it is bound now, decoded where it is stored packed or quantised."""
    forward = linear.__dict__.get("forward")
    if isinstance(forward, StoredLinear):
        return dequantize(forward.stored, dtype)
    return linear.weight
