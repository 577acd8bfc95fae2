"""The experts function that transformers' MoE blocks call: their weights as stored, computed by the model's backend."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from hpcgen.kernels.experts.interface import ExpertsBackend, ExpertWeights
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.attention_function import IMPLEMENTATION
from hpcgen.model.errors import ModelError
from hpcgen.model.linear import ACTIVATIONS, Activation

ExpertsActivation = Activation | Literal["swiglu_oai"]


class HasExpertsBackend(Protocol):
    experts_backend: ExpertsBackend


@dataclass
class ExpertsLayer:
    """The experts of one sparse layer: how they compute, and the weights that are bound now."""

    owner: HasExpertsBackend
    """The model: its backend can be exchanged, say for an expert-parallel one, without touching the layers."""
    layer: int
    activation: ExpertsActivation
    transposed: bool
    interleaved: bool
    alpha: float = 1.702
    limit: float = 7.0
    weights: ExpertWeights | None = None

    def weights_of(self, stored: dict[str, StoredTensor], first: int = 0) -> ExpertWeights:
        """`stored` by parameter name: gate_up_proj, down_proj, and their biases where there are some."""
        biases = {name: tensor.data for name, tensor in stored.items() if name.endswith("_bias")}
        return ExpertWeights(
            gate_up=stored["gate_up_proj"],
            down=stored["down_proj"],
            gate_up_bias=biases.get("gate_up_proj_bias"),
            down_bias=biases.get("down_proj_bias"),
            transposed=self.transposed,
            interleaved=self.interleaved,
            activation=self.activation,
            alpha=self.alpha,
            limit=self.limit,
            first=first,
        )


def is_experts_module(module: nn.Module) -> bool:
    """A module that transformers' `use_experts_implementation` has decorated."""
    return hasattr(module, "is_concatenated") and hasattr(module, "is_transposed")


def attach(module: nn.Module, owner: HasExpertsBackend, layer: int) -> ExpertsLayer:
    """Gives an experts module its `ExpertsLayer`. Raises ModelError for experts that the kernels do not compute."""
    if not module.has_gate or module.has_post_expert_norm:
        raise ModelError(f"{type(module).__name__} has experts without a gate, or with a norm: not supported.")
    experts = ExpertsLayer(
        owner, layer, _activation(module), bool(module.is_transposed), interleaved=not module.is_concatenated
    )
    if experts.activation == "swiglu_oai":
        experts.alpha, experts.limit = float(module.alpha), float(module.limit)  # type: ignore[arg-type]
    module.__dict__["experts_layer"] = experts
    return experts


def _activation(module: nn.Module) -> ExpertsActivation:
    if type(module)._apply_gate is _default_apply_gate:  # type: ignore[attr-defined]
        activation = ACTIVATIONS.get(type(module.act_fn))
        if activation is not None:
            return activation
    elif hasattr(module, "alpha") and hasattr(module, "limit"):
        return "swiglu_oai"
    raise ModelError(f"{type(module).__name__} has an activation that the experts kernels do not compute.")


def stored_experts(
    module: nn.Module, hidden_TD: torch.Tensor, top_index_TK: torch.Tensor, top_weight_TK: torch.Tensor
) -> torch.Tensor:
    """The experts function: hidden_TD [T, D], top_index_TK int64 and top_weight_TK [T, K] -> [T, D]."""
    experts: ExpertsLayer = module.experts_layer  # type: ignore[assignment]
    if experts.weights is None:
        raise RuntimeError(f"layer.{experts.layer} is not bound: its experts have no weights")
    return experts.owner.experts_backend.forward(experts.weights, hidden_TD, top_index_TK, top_weight_TK)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, stored_experts)
