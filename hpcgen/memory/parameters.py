"""Parameters on the device: used in place, resident, or streamed through a ring buffer, unit by unit.

A unit is what is bound at once: the embedding, a decoder layer, the head. The model never owns parameters; before a
unit runs, `require` points its modules at where the unit's bytes lie now.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from hpcgen.errors import HpcgenError
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.memory.budget import DeviceBudget
from hpcgen.memory.streams import CopyPair, CopyStream, Event

PIECE_ALIGNMENT = 4096
"""Bytes. Pieces of a unit start at multiples of it in a buffer, so that tensors are aligned as in the weight file."""


class WeightSource(Protocol):
    """Weights in host memory, as far as a device needs them: the weight file, or a rank's part of it."""

    def unit_bytes(self, unit: str) -> int:
        """Size of a buffer that holds the unit's pieces."""

    def unit_pieces(self, unit: str) -> Seq[torch.Tensor]:
        """uint8 [n] of host memory each: what is copied into a buffer, one after another, each aligned."""

    def unit_views(self, unit: str, buffer: torch.Tensor) -> dict[str, StoredTensor]:
        """The unit's tensors, seen in a copy of its pieces at the start of `buffer`."""


class BoundUnit(Protocol):
    def apply(self) -> None:
        """Points the unit's modules at its tensors."""


class Binder(Protocol):
    """The model, as far as binding needs it."""

    def prepare(self, unit: str, tensors: dict[str, StoredTensor]) -> BoundUnit: ...

    def unbind(self, unit: str) -> None:
        """Takes the unit's tensors away, so that running it fails instead of reading freed memory."""


class Parameters(Protocol):
    """Makes a unit ready to run."""

    def require(self, unit: str) -> None: ...


class InPlaceParameters:
    """Units bound once to the memory-mapped weight file: no copy. For a CPU without a device budget."""

    def __init__(self, source: WeightSource, binder: Binder, units: Seq[str]):
        """`source` has each unit in one piece."""
        for unit in units:
            (piece,) = source.unit_pieces(unit)
            binder.prepare(unit, source.unit_views(unit, piece)).apply()

    def require(self, unit: str) -> None:
        """Nothing to do: every unit stays bound."""


class ResidentUnits:
    """Units whose bytes stay on the device. What stays resident over a phase switch is not copied again."""

    def __init__(self, budget: DeviceBudget, stream: CopyStream):
        self._budget, self._stream = budget, stream
        self._held: dict[str, tuple[Binder, _Form]] = {}

    @property
    def units(self) -> set[str]:
        return set(self._held)

    def release_except(self, source: WeightSource, units: Seq[str]) -> None:
        """Gives back the memory of all but `units`, and of those that `source` has other bytes of. Do so before
        anything new is reserved."""
        for unit, (binder, form) in list(self._held.items()):
            if unit not in units or form != _form(source.unit_pieces(unit)):
                binder.unbind(unit)
                self._budget.release(f"resident {unit}")
                del self._held[unit]

    def load(self, source: WeightSource, binder: Binder, units: Seq[str]) -> None:
        """Copies the units that are not resident yet."""
        for unit in units:
            if unit in self._held:
                continue
            buffer = self._budget.buffer(f"resident {unit}", source.unit_bytes(unit))
            pieces = source.unit_pieces(unit)
            self._stream.copy(_copies(pieces, buffer)).wait()
            binder.prepare(unit, source.unit_views(unit, buffer)).apply()
            self._held[unit] = binder, _form(pieces)


_Form = tuple[tuple[int, int], ...]
"""(address, bytes) of the pieces: equal where two sources have the same bytes of a unit."""


def _form(pieces: Seq[torch.Tensor]) -> _Form:
    return tuple((piece.data_ptr(), piece.numel()) for piece in pieces)


def _copies(pieces: Seq[torch.Tensor], buffer: torch.Tensor) -> list[CopyPair]:
    """What brings the pieces of a unit to the start of `buffer`."""
    pairs, offset = [], 0
    for piece in pieces:
        pairs.append((buffer[offset : offset + piece.numel()], piece))
        offset += aligned(piece.numel())
    return pairs


def aligned(nbytes: int) -> int:
    """The room that a piece of so many bytes takes in a buffer."""
    return -(-nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT


class _Slot:
    """One place of the ring, and the unit whose bytes are in it."""

    def __init__(self, buffer: torch.Tensor):
        self.buffer = buffer
        self.unit: str | None = None
        self.loaded: Event | None = None
        self.bound = False
        self.last_use = 0


class StreamedParameters:
    """Some units resident on the device, the others copied into a ring of slots just before their turn.

    While one streamed unit computes, the next ones in model order are copied (paper §5.1). Whoever runs a unit calls
    `require` first, at every resume, so that a slot which was overwritten meanwhile is never read.
    """

    def __init__(
        self,
        source: WeightSource,
        binder: Binder,
        units: Seq[str],
        resident: "ResidentUnits",
        ring_slots: int,
        budget: DeviceBudget,
        stream: CopyStream,
    ):
        """`units` in model order; those that are not resident share `ring_slots` slots."""
        self._source, self._binder, self._stream = source, binder, stream
        self._streamed = [unit for unit in units if unit not in resident.units]
        self._position = {unit: i for i, unit in enumerate(self._streamed)}
        self._prepared: dict[tuple[str, int], BoundUnit] = {}
        self._clock = 0
        self.copied_bytes = 0
        if self._streamed and ring_slots < 1:
            raise HpcgenError("Streamed parameters need a ring buffer of at least one slot.")
        slots = min(ring_slots, len(self._streamed))
        size = max((source.unit_bytes(unit) for unit in self._streamed), default=0)
        self._slots = [_Slot(budget.buffer("ring buffer", size)) for _ in range(slots)]
        self._where: dict[str, _Slot] = {}

    def require(self, unit: str) -> None:
        """Binds `unit`, waiting for its copy, and starts the copies of the streamed units after it."""
        if unit not in self._position:
            return
        self._clock += 1
        ahead = [self._streamed[(self._position[unit] + k) % len(self._streamed)] for k in range(len(self._slots))]
        # All of them count as used now before any is loaded: a load takes the slot that was used longest ago.
        for following in ahead:
            if following in self._where:
                self._where[following].last_use = self._clock
        for following in ahead:
            if following not in self._where:
                self._load(following)
        self._bind(unit, self._where[unit])

    def _load(self, unit: str) -> None:
        slot = min(self._slots, key=lambda s: s.last_use)
        if slot.unit is not None:
            del self._where[slot.unit]
        slot.unit, self._where[unit] = unit, slot
        slot.last_use, slot.bound = self._clock, False
        pairs = _copies(self._source.unit_pieces(unit), slot.buffer)
        slot.loaded = self._stream.copy(pairs)
        self.copied_bytes += sum(source.numel() for _, source in pairs)

    def _bind(self, unit: str, slot: _Slot) -> None:
        if slot.bound:
            return
        assert slot.loaded is not None
        slot.loaded.wait()
        key = (unit, slot.buffer.data_ptr())
        bound = self._prepared.get(key)
        if bound is None:
            bound = self._prepared[key] = self._binder.prepare(unit, self._source.unit_views(unit, slot.buffer))
        bound.apply()
        slot.bound = True
