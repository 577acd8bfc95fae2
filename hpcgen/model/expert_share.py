"""The weights that one rank of an expert-parallel decode keeps: of each sparse layer only its own experts."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.binding import BoundUnit
from hpcgen.model.causal import CausalModel
from hpcgen.model.weight_file import WeightFile
from hpcgen.model.weight_format import Entry, Record, align


class _Piece(NamedTuple):
    """Bytes [start, stop) of the file that lie at `offset` in a buffer, and the weights in them."""

    start: int
    stop: int
    offset: int
    records: tuple[Record, ...]
    """Whole weights; of experts, one weight of which a run is here."""


class ExpertShare:
    """Experts [first, first + count) of every sparse layer, and all of everything else.

    To a device it is what the weight file and the model are: the source of the bytes, and what binds them.
    """

    def __init__(self, weights: WeightFile, model: CausalModel, first: int, count: int) -> None:
        self.first, self.count = first, count
        self._weights, self._model = weights, model
        prefixes = tuple(f"{path}." for path, m in model.module.named_modules() if "experts_layer" in m.__dict__)
        self._experts = {name for names in model.units.values() for name in names if name.startswith(prefixes)}
        self._pieces = {unit: tuple(self._cut(unit)) for unit in model.units}

    def unit_bytes(self, unit: str) -> int:
        """Size of a buffer for the unit, each piece aligned as weights are in the file."""
        last = self._pieces[unit][-1]
        return last.offset + align(last.stop - last.start)

    def unit_pieces(self, unit: str) -> list[torch.Tensor]:
        """What is copied: uint8 views of the file."""
        return [self._weights.bytes(piece.start, piece.stop) for piece in self._pieces[unit]]

    def unit_views(self, unit: str, buffer: torch.Tensor) -> dict[str, StoredTensor]:
        """The weights of a unit in a buffer that its pieces were copied into; of experts, the run."""
        views: dict[str, StoredTensor] = {}
        for piece in self._pieces[unit]:
            for record in piece.records:
                if record.name not in self._experts:
                    views[record.name] = self._weights.view_in(buffer, piece.start - piece.offset, record.name)
                elif (known := views.get(record.name)) is None:
                    data = self._run(buffer, piece, record.data)
                    shape = (self.count, *record.shape[1:])
                    views[record.name] = StoredTensor(data, shape, record.layout, block=record.block)
                else:  # the second piece of a quantised weight
                    assert record.scale is not None
                    scale = self._run(buffer, piece, record.scale)
                    views[record.name] = StoredTensor(known.data, known.shape, known.layout, scale, known.block)
        return views

    def prepare(self, unit: str, tensors: Mapping[str, StoredTensor]) -> BoundUnit:
        """As `CausalModel.prepare`, of what `unit_views` gives."""
        return self._model.prepare(unit, tensors, first_expert=self.first)

    def unbind(self, unit: str) -> None:
        """Takes the unit's weights away from the model."""
        self._model.unbind(unit)

    def _cut(self, unit: str) -> Iterator[_Piece]:
        """Stretches of whole weights, and between them the runs of experts."""
        offset, whole = 0, list[Record]()
        for record in (*map(self._weights.record, self._weights.unit_names(unit)), None):
            if record is not None and record.name not in self._experts:
                whole.append(record)
                continue
            if whole:
                yield (piece := _Piece(whole[0].start, whole[-1].stop, offset, tuple(whole)))
                offset += align(piece.stop - piece.start)
                whole = []
            for entry in record.entries if record is not None else ():
                each = entry.bytes // entry.shape[0]
                start = entry.start + self.first * each
                yield _Piece(start, start + self.count * each, offset, (record,))  # type: ignore[arg-type]
                offset += align(self.count * each)

    def _run(self, buffer: torch.Tensor, piece: _Piece, entry: Entry) -> torch.Tensor:
        run = buffer[piece.offset : piece.offset + piece.stop - piece.start]
        return run.view(entry.dtype).view(self.count, *entry.shape[1:])
