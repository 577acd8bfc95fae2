"""Binding: giving a unit of a model on the meta device its weights, for the time they lie in memory.

A streamed model binds each layer at every step, so `prepare` makes the Parameter objects once for each place that
weights can lie in (a ring slot, the weight file), and `apply` is a few dictionary assignments. (`param.data = view`
fails for a parameter on the meta device; assigning into `_parameters` does not.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.errors import ModelError
from hpcgen.model.experts import ExpertsLayer
from hpcgen.model.linear import STORED_WEIGHT
from hpcgen.model.units import aliases_of

Assignment = tuple[dict[str, Any], str, Any]
"""A dictionary, a key in it, and the value that it gets."""


@dataclass(frozen=True, slots=True)
class BoundUnit:
    """Weights of one unit at one place in memory, ready to be the model's."""

    unit: str
    assignments: tuple[Assignment, ...]

    def apply(self) -> None:
        """Makes these the weights that the unit computes with, in place of what was bound before."""
        for dictionary, key, value in self.assignments:
            dictionary[key] = value


class _Place(NamedTuple):
    """Where a tensor of the state dict goes in the modules."""

    module: nn.Module
    leaf: str
    is_buffer: bool

    @property
    def experts(self) -> ExpertsLayer | None:
        return self.module.__dict__.get("experts_layer")

    @property
    def may_be_packed(self) -> bool:
        return self.leaf == "weight" and STORED_WEIGHT in self.module.__dict__

    @property
    def tensors(self) -> dict[str, Any]:
        return self.module._buffers if self.is_buffer else self.module._parameters


class UnitBinder:
    """The places in a model that the weights of each unit go to."""

    def __init__(self, model: PreTrainedModel, units: dict[str, list[str]]) -> None:
        self.units = units
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
        self._places: dict[str, list[_Place]] = {}
        modules, aliases = dict(model.named_modules()), aliases_of(model)
        for name in self.shapes:
            path, _, leaf = name.rpartition(".")
            place = _Place(modules[path], leaf, leaf in modules[path]._buffers)
            self._places.setdefault(aliases.get(name, name), []).append(place)

    def prepare(
        self,
        unit: str,
        tensors: Mapping[str, StoredTensor],
        first_expert: int = 0,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> BoundUnit:
        """The unit's weights as `tensors`, by parameter name; of the experts it may be a run from `first_expert` on.

        `shapes` are those to expect where they are not the definition's (tensor-parallel shards).
        Raises ModelError for a missing tensor or one of another shape, and for a packed or quantised one where only
        plain ones can be computed with.
        """
        assignments: list[Assignment] = []
        experts: dict[int, tuple[ExpertsLayer, dict[str, StoredTensor]]] = {}
        for name in self.units[unit]:
            stored = tensors.get(name)
            if stored is None:
                raise ModelError(f"Weight '{name}' is missing: convert the model again.")
            expected = (shapes or self.shapes).get(name, self.shapes[name])
            for place in self._places[name]:
                layer = place.experts
                _check_shape(name, stored, expected, is_expert=layer is not None)
                if layer is not None:
                    experts.setdefault(id(layer), (layer, {}))[1][place.leaf] = stored
                else:
                    assignments.extend(_assignments(name, place, stored))
        for layer, parts in experts.values():
            assignments.append((layer.__dict__, "weights", layer.weights_of(parts, first_expert)))
        return BoundUnit(unit, tuple(assignments))

    def unbind(self, unit: str) -> None:
        """Takes the unit's tensors away: computing with it raises AttributeError instead of reading old bytes.

        Parameters on the meta device would not do: torch multiplies by them without an error and returns memory that
        nothing has written.
        """
        for name in self.units[unit]:
            for place in self._places[name]:
                place.tensors.pop(place.leaf, None)
                if place.experts is not None:
                    place.experts.weights = None
                if place.may_be_packed:
                    place.module.__dict__[STORED_WEIGHT] = None


def _assignments(name: str, place: _Place, stored: StoredTensor) -> list[Assignment]:
    if stored.layout == "plain":
        value = stored.data if place.is_buffer else nn.Parameter(stored.data, requires_grad=False)
        assignments: list[Assignment] = [(place.tensors, place.leaf, value)]
        if place.may_be_packed:
            assignments.append((place.module.__dict__, STORED_WEIGHT, None))
        return assignments
    if not place.may_be_packed:
        kind = type(place.module).__name__
        raise ModelError(f"Weight '{name}' is stored as '{stored.layout}', but {kind} needs a plain one.")
    return [(place.tensors, place.leaf, None), (place.module.__dict__, STORED_WEIGHT, stored)]


def _check_shape(name: str, stored: StoredTensor, expected: tuple[int, ...], is_expert: bool) -> None:
    got = tuple(stored.shape)
    if got != expected and not (is_expert and got[1:] == expected[1:] and got[0] <= expected[0]):
        raise ModelError(f"Weight '{name}' has shape {list(got)}, but the configuration asks for {list(expected)}.")
