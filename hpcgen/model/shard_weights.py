"""A tensor-parallel shard as units that a device with a budget holds or streams, as it does with the weight file."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.binding import BoundUnit
from hpcgen.model.tensor_parallel import TensorParallelShard
from hpcgen.model.weight_file import WeightFile
from hpcgen.model.weight_format import align


class _Place(NamedTuple):
    """Where a part lies in a buffer: its data, and the scales of one that stayed quantised."""

    stored: StoredTensor
    """On the meta device."""
    data: int
    scale: int


class ShardWeights:
    """Parts are cut out of the file when they are asked for; those of units that are streamed are kept."""

    def __init__(self, shard: TensorParallelShard, weights: WeightFile) -> None:
        self._shard, self._weights = shard, weights
        self._kept: dict[str, list[torch.Tensor] | None] = {}
        self._places: dict[str, dict[str, _Place]] = {}
        self._bytes: dict[str, int] = {}
        for unit, names in shard.model.units.items():
            places, offset = {}, 0
            for name in names:
                part = shard.part_layout(name, weights.get(name))
                scale = offset + align(part.data.nbytes)
                places[name] = _Place(part, offset, scale)
                offset = scale + (align(part.scale.nbytes) if part.scale is not None else 0)
            self._places[unit], self._bytes[unit] = places, offset

    def keep(self, units: Iterable[str]) -> None:
        """The parts of these are asked for at every step: they stay in host memory once they are made."""
        self._kept = dict.fromkeys(units)

    def unit_bytes(self, unit: str) -> int:
        """Size of a buffer that holds the unit's parts."""
        return self._bytes[unit]

    def unit_pieces(self, unit: str) -> list[torch.Tensor]:
        """uint8 [n] of each part's data and scales, in the order of `unit_views`."""
        pieces = self._kept.get(unit)
        if pieces is None:
            names = self._shard.model.units[unit]
            parts = self._shard.shard({name: self._weights.get(name) for name in names})
            pieces = [
                _bytes(tensor)
                for name in names
                for tensor in (parts[name].data, parts[name].scale)
                if tensor is not None
            ]
            if unit in self._kept:
                self._kept[unit] = pieces
        return pieces

    def unit_views(self, unit: str, buffer: torch.Tensor) -> dict[str, StoredTensor]:
        """The parts in a buffer that the pieces were copied into."""
        views = {}
        for name, (stored, data, scale) in self._places[unit].items():
            views[name] = StoredTensor(
                _seen(buffer, data, stored.data),
                stored.shape,
                stored.layout,
                None if stored.scale is None else _seen(buffer, scale, stored.scale),
                stored.block,
            )
        return views

    def prepare(self, unit: str, tensors: Mapping[str, StoredTensor]) -> BoundUnit:
        """Binds what `unit_views` gives to the shard's definition."""
        return self._shard.prepare_parts(unit, tensors)

    def unbind(self, unit: str) -> None:
        """Takes the unit's parts away from the definition."""
        self._shard.model.unbind(unit)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _seen(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
