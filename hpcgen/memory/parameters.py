"""Parameters on the device: used in place, resident, or streamed through a ring buffer, unit by unit.

A unit is what is bound at once: the embedding, a decoder layer, the head. The model never owns parameters; before a
unit runs, `require` points its modules at where the unit's bytes lie now.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from hpcgen.errors import HpcgenError
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.memory.budget import DeviceBudget
from hpcgen.memory.streams import CopyStream, Event


class WeightSource(Protocol):
    """The weight file, as far as streaming needs it."""

    def unit_range(self, unit: str) -> tuple[int, int]:
        """Byte range of the unit; its tensors lie in it without others between."""

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        """uint8 view of a byte range."""

    def unit_views(self, unit: str, buffer: torch.Tensor) -> dict[str, StoredTensor]:
        """The unit's tensors, seen in a copy of its byte range at the start of `buffer`."""


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

    def __init__(self, source: WeightSource, binder: Binder, units: Sequence[str]):
        for unit in units:
            start, stop = source.unit_range(unit)
            binder.prepare(unit, source.unit_views(unit, source.bytes(start, stop))).apply()

    def require(self, unit: str) -> None:
        """Nothing to do: every unit stays bound."""


class ResidentUnits:
    """Units whose bytes stay on the device. What stays resident over a phase switch is not copied again."""

    def __init__(self, source: WeightSource, binder: Binder, budget: DeviceBudget, stream: CopyStream):
        self._source, self._binder, self._budget, self._stream = source, binder, budget, stream
        self.units: set[str] = set()

    def release_except(self, units: Sequence[str]) -> None:
        """Gives back the memory of the units that are not among `units`. Do so before anything new is reserved."""
        for unit in self.units - set(units):
            self._binder.unbind(unit)
            self._budget.release(f"resident {unit}")
        self.units &= set(units)

    def load(self, units: Sequence[str]) -> None:
        """Copies the units that are not resident yet."""
        for unit in units:
            if unit in self.units:
                continue
            start, stop = self._source.unit_range(unit)
            buffer = self._budget.buffer(f"resident {unit}", stop - start)
            self._stream.copy([(buffer, self._source.bytes(start, stop))]).wait()
            self._binder.prepare(unit, self._source.unit_views(unit, buffer)).apply()
            self.units.add(unit)


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
        units: Sequence[str],
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
        size = max((self._size(unit) for unit in self._streamed), default=0)
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
        start, stop = self._source.unit_range(unit)
        slot.unit, self._where[unit] = unit, slot
        slot.last_use, slot.bound = self._clock, False
        slot.loaded = self._stream.copy([(slot.buffer[: stop - start], self._source.bytes(start, stop))])
        self.copied_bytes += stop - start

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

    def _size(self, unit: str) -> int:
        start, stop = self._source.unit_range(unit)
        return stop - start
