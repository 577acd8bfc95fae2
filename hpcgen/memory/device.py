"""The device as the engine sees it: parameters and KV, arranged anew at each phase switch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcgen.memory.budget import DeviceBudget
from hpcgen.memory.device_plan import PhaseMemory
from hpcgen.memory.host_store import HostStore
from hpcgen.memory.kv.device_pages import DevicePagesKV
from hpcgen.memory.kv.in_place import InPlaceKV
from hpcgen.memory.kv.interface import KVPlacement
from hpcgen.memory.kv.layer_stream import LayerStreamKV
from hpcgen.memory.parameters import (
    Binder,
    InPlaceParameters,
    Parameters,
    ResidentUnits,
    StreamedParameters,
    WeightSource,
)
from hpcgen.memory.streams import CopyStream
from hpcgen.scheduler.plan import Phase


class Device(Protocol):
    """Where parameters and KV are while a phase runs."""

    @property
    def parameters(self) -> Parameters: ...

    @property
    def kv(self) -> KVPlacement: ...

    @property
    def keeps_kv(self) -> bool:
        """Whether KV on the device outlives a phase switch."""

    def enter(self, phase: Phase) -> None:
        """Arranges the memory for a phase. No sequence may have KV on the device, unless `keeps_kv`."""

    def vacate(self) -> None:
        """Gives the memory of the device to others until the next `enter`; `kv` is used in the host store."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PhaseSetup:
    """What a device holds in one phase."""

    memory: PhaseMemory
    source: WeightSource
    """Of parameters: all of them, or those that this rank computes with."""
    binder: Binder


class InPlaceDevice:
    """A CPU without a limit: weight file and host store are used where they are."""

    keeps_kv = True

    def __init__(self, source: WeightSource, binder: Binder, units: Sequence[str], store: HostStore):
        self.parameters: Parameters = InPlaceParameters(source, binder, units)
        self.kv: KVPlacement = InPlaceKV(store)

    def enter(self, phase: Phase) -> None:
        """Both phases use the same memory."""

    def vacate(self) -> None:
        """It has no memory of its own."""

    def close(self) -> None:
        """Nothing was opened."""


class BudgetedDevice:
    """A device with a limit, arranged as the PhaseSetup of each phase says."""

    keeps_kv = False

    def __init__(
        self,
        units: Sequence[str],
        store: HostStore,
        budget: DeviceBudget,
        phases: Mapping[Phase, PhaseSetup],
        stream: CopyStream,
        synchronize: Callable[[], None],
    ):
        self._units, self._store = units, store
        self._budget, self._phases, self._stream, self._synchronize = budget, phases, stream, synchronize
        self._resident = ResidentUnits(budget, stream)
        self._phase: Phase | None = None
        self.parameters: Parameters
        self.kv: KVPlacement
        self.enter(Phase.PREFILL)

    def enter(self, phase: Phase) -> None:
        if phase is self._phase:
            return
        setup = self._phases[phase]
        memory, source, binder = setup.memory, setup.source, setup.binder
        self._release(source, memory.resident)
        self._budget.reserve("activations", memory.activation_bytes)
        self._resident.load(source, binder, memory.resident)
        self.parameters = StreamedParameters(
            source, binder, self._units, self._resident, memory.ring_slots, self._budget, self._stream
        )
        buffer = self._budget.buffer("KV", memory.kv_bytes)
        if memory.kv == "pages":
            self.kv = DevicePagesKV(self._store, buffer, self._stream)
        else:
            self.kv = LayerStreamKV(self._store, buffer, self._stream)
        self._phase = phase

    def vacate(self) -> None:
        self._release(self._phases[Phase.DECODE].source, ())
        self.kv = InPlaceKV(self._store)
        self._phase = None

    def _release(self, source: WeightSource, kept: Sequence[str]) -> None:
        """Buffers of the last phase go before those of the next one come: both together may pass the budget."""
        self._stream.synchronize()
        self._synchronize()
        self.__dict__.pop("parameters", None)
        self.__dict__.pop("kv", None)
        for purpose in ("ring buffer", "KV", "activations"):
            self._budget.release(purpose)
        self._resident.release_except(source, kept)

    def close(self) -> None:
        self._stream.close()
