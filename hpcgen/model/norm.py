"""Root-mean-square norms in one pass, where a definition's norm is Llama's and a kernel computes it."""

import inspect

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hpcgen.kernels.rows import norms_rows, rms_norm


class OnePassNorm:
    """The `forward` of an RMS norm."""

    __slots__ = ("module", "own_forward")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own_forward = module, module.forward

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        weight: torch.Tensor = self.module.weight  # type: ignore[assignment]
        if not norms_rows(hidden_states, weight):
            return self.own_forward(hidden_states)
        return rms_norm(hidden_states, weight, self.module.variance_epsilon)  # type: ignore[arg-type]


def norm_in_one_pass(model: nn.Module) -> None:
    """Gives every norm of `model` that computes as Llama's the `forward` above."""
    forward = inspect.getsource(LlamaRMSNorm.forward)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and inspect.getsource(type(module).forward) == forward:
            module.__dict__["forward"] = OnePassNorm(module)
