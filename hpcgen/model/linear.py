"""Linear modules, embeddings and gated MLPs over weights as they are stored: plain, packed for a kernel, or quantised.

Each nn.Linear and nn.Embedding gets a `forward` once, when the model is built, that looks at what is bound: so a
wrapper put around it later (a yield point at the head) stays in place whatever is bound.
"""

import inspect
from typing import Literal

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.layouts import PANELS, StoredTensor, take_rows
from hpcgen.kernels.linear import gated_mlp, linear, plain_linear

STORED_WEIGHT = "stored_weight"
"""Attribute of an nn.Linear or nn.Embedding: its weight where that is not plain, else None."""
Activation = Literal["silu", "gelu_tanh", "gelu"]
ACTIVATIONS: dict[type, Activation] = {
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu"]): "gelu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}
"""Activation modules to the kernels' names for them."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class StoredLinear:
    """The `forward` of an nn.Linear."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        module = self.module
        stored: StoredTensor | None = module.__dict__[STORED_WEIGHT]
        if stored is None:
            return plain_linear(input, module.weight, module.bias)
        return linear(input, stored, module.bias)


class StoredEmbedding:
    """The `forward` of an nn.Embedding; packed where its weight is the head's too."""

    __slots__ = ("module", "own_forward")

    def __init__(self, module: nn.Embedding) -> None:
        self.module, self.own_forward = module, module.forward

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., D]"""
        stored: StoredTensor | None = self.module.__dict__[STORED_WEIGHT]
        return self.own_forward(input) if stored is None else take_rows(stored, input)


class StoredGatedMLP:
    """The `forward` of a gated MLP: one kernel where all three weights are packed for it, else its own."""

    __slots__ = ("activation", "own_forward", "projections")

    def __init__(self, module: nn.Module, projections: list[nn.Linear], activation: Activation) -> None:
        self.own_forward = module.forward
        self.projections = projections
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        gate, up, down = (projection.__dict__[STORED_WEIGHT] for projection in self.projections)
        if any(stored is None or stored.layout != PANELS for stored in (gate, up, down)):
            return self.own_forward(x)
        return gated_mlp(x, gate, up, down, self.activation)


def read_stored_weights(model: nn.Module) -> None:
    """Gives what computes with weights that may be stored so a `forward` over them: every nn.Linear and nn.Embedding
    of `model`, and every MLP that is gated as Llama's."""
    for module in model.modules():
        if type(module) is nn.Embedding:
            module.__dict__[STORED_WEIGHT] = None
            module.__dict__["forward"] = StoredEmbedding(module)
        if type(module) is nn.Linear:
            module.__dict__[STORED_WEIGHT] = None
            module.__dict__["forward"] = StoredLinear(module)
    gated_forward = inspect.getsource(LlamaMLP.forward)
    for module in model.modules():
        linears = [getattr(module, name, None) for name in _PROJECTIONS]
        if any(type(projection) is not nn.Linear or projection.bias is not None for projection in linears):
            continue
        activation = ACTIVATIONS.get(type(getattr(module, "act_fn", None)))
        if activation is not None and inspect.getsource(type(module).forward) == gated_forward:
            module.__dict__["forward"] = StoredGatedMLP(module, linears, activation)  # type: ignore[arg-type]


def dense_weight(linear: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] as it is bound now, decoded where it is stored packed or quantised."""
    stored: StoredTensor | None = linear.__dict__[STORED_WEIGHT]
    return linear.weight if stored is None else dequantize(stored, dtype)
