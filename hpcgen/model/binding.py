"""Binding: giving a unit of a model on the meta device its weights, for the time they lie in memory.

A streamed model binds each layer at every step, so `prepare` makes the Parameter objects once for each place that
weights can lie in (a ring slot, the weight file), and `apply` is a few dictionary assignments. (`param.data = view`
fails for a parameter on the meta device; assigning into `_parameters` does not.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.errors import ModelError
from hpcgen.model.experts import ExpertsLayer
from hpcgen.model.linear import StoredLinear
from hpcgen.model.units import aliases_of

Assignment = tuple[dict[str, Any], str, Any]


@dataclass(frozen=True, slots=True)
class BoundUnit:
    """Weights of one unit at one place in memory, ready to be the model's."""

    unit: str
    assignments: tuple[Assignment, ...]

    def apply(self) -> None:
        """Makes these the weights that the unit computes with, in place of what was bound before."""
        for dictionary, key, value in self.assignments:
            dictionary[key] = value


class UnitBinder:
    """The places in a model that the weights of each unit go to."""

    def __init__(self, model: PreTrainedModel, units: dict[str, list[str]]) -> None:
        self.units = units
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        modules = dict(model.named_modules())
        for name in self._shapes:
            path, _, leaf = name.rpartition(".")
            self._places.setdefault(aliases_of(model).get(name, name), []).append((modules[path], leaf))
        self._unbound = {unit: self._meta_assignments(names) for unit, names in units.items()}

    def prepare(self, unit: str, tensors: Mapping[str, StoredTensor], first_expert: int = 0) -> BoundUnit:
        """The unit's weights as `tensors`, by parameter name; of the experts it may be a run from `first_expert` on.

        Raises ModelError for a missing tensor or one of another shape, and for a packed or quantised one where only
        plain ones can be computed with.
        """
        assignments: list[Assignment] = []
        experts: dict[str, tuple[ExpertsLayer, dict[str, StoredTensor]]] = {}
        for name in self.units[unit]:
            stored = tensors.get(name)
            if stored is None:
                raise ModelError(f"Weight '{name}' is missing: convert the model again.")
            for module, leaf in self._places[name]:
                layer: ExpertsLayer | None = module.__dict__.get("experts_layer")
                self._check_shape(name, stored, experts=layer is not None)
                if layer is not None:
                    path = name.rpartition(".")[0]
                    experts.setdefault(path, (layer, {}))[1][leaf] = stored
                elif stored.layout == "plain":
                    assignments.append(_plain(module, leaf, stored.data))
                elif isinstance(module, nn.Linear) and leaf == "weight":
                    bias = tensors.get(name.removesuffix("weight") + "bias") if module.bias is not None else None
                    linear = StoredLinear(stored, None if bias is None else bias.data)
                    assignments.append((module.__dict__, "forward", linear))
                else:
                    raise ModelError(
                        f"Weight '{name}' is stored as '{stored.layout}'; {type(module).__name__} needs a plain one."
                    )
        for layer, parts in experts.values():
            assignments.append((layer.__dict__, "weights", layer.weights_of(parts, first_expert)))
        return BoundUnit(unit, tuple(assignments))

    def unbind(self, unit: str) -> None:
        """Puts parameters without storage back, so that computing with the unit fails instead of reading old bytes."""
        for dictionary, key, value in self._unbound[unit]:
            dictionary[key] = value
        for name in self.units[unit]:
            for module, leaf in self._places[name]:
                if leaf == "weight" and isinstance(module.__dict__.get("forward"), StoredLinear):
                    del module.__dict__["forward"]

    def _meta_assignments(self, names: list[str]) -> list[Assignment]:
        assignments: list[Assignment] = []
        for name in names:
            for module, leaf in self._places[name]:
                if "experts_layer" in module.__dict__:
                    assignments.append((module.__dict__["experts_layer"].__dict__, "weights", None))
                elif leaf in module._buffers:
                    assignments.append((module._buffers, leaf, module._buffers[leaf]))
                else:
                    assignments.append((module._parameters, leaf, module._parameters[leaf]))
        return assignments

    def _check_shape(self, name: str, stored: StoredTensor, experts: bool) -> None:
        expected, got = self._shapes[name], tuple(stored.shape)
        if got != expected and not (experts and got[1:] == expected[1:] and got[0] <= expected[0]):
            raise ModelError(f"Weight '{name}' has shape {list(got)}, but the configuration asks for {list(expected)}.")


def _plain(module: nn.Module, leaf: str, data: torch.Tensor) -> Assignment:
    if leaf in module._buffers:
        return module._buffers, leaf, data
    return module._parameters, leaf, nn.Parameter(data, requires_grad=False)
