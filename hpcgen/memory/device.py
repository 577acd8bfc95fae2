"""The device as the engine sees it: parameters and KV, arranged anew at each phase switch."""

from collections.abc import Callable, Sequence
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

    def close(self) -> None: ...


class InPlaceDevice:
    """A CPU without a limit: weight file and host store are used where they are."""

    keeps_kv = True

    def __init__(self, source: WeightSource, binder: Binder, units: Sequence[str], store: HostStore):
        self.parameters: Parameters = InPlaceParameters(source, binder, units)
        self.kv: KVPlacement = InPlaceKV(store)

    def enter(self, phase: Phase) -> None:
        """Both phases use the same memory."""

    def close(self) -> None:
        """Nothing was opened."""


class BudgetedDevice:
    """A device with a limit, divided by a PhaseMemory for each phase."""

    keeps_kv = False

    def __init__(
        self,
        source: WeightSource,
        binder: Binder,
        units: Sequence[str],
        store: HostStore,
        budget: DeviceBudget,
        phases: dict[Phase, PhaseMemory],
        stream: CopyStream,
        synchronize: Callable[[], None],
    ):
        self._source, self._binder, self._units, self._store = source, binder, units, store
        self._budget, self._phases, self._stream, self._synchronize = budget, phases, stream, synchronize
        self._resident = ResidentUnits(source, binder, budget, stream)
        self._phase: Phase | None = None
        self.parameters: Parameters
        self.kv: KVPlacement
        self.enter(Phase.PREFILL)

    def enter(self, phase: Phase) -> None:
        if phase is self._phase:
            return
        self._stream.synchronize()
        self._synchronize()
        memory = self._phases[phase]
        # Buffers of the last phase go before those of this one come: both together may pass the budget.
        self.__dict__.pop("parameters", None)
        self.__dict__.pop("kv", None)
        for purpose in ("ring buffer", "KV", "activations"):
            self._budget.release(purpose)
        self._resident.release_except(memory.resident)
        self._budget.reserve("activations", memory.activation_bytes)
        self._resident.load(memory.resident)
        self.parameters = StreamedParameters(
            self._source, self._binder, self._units, self._resident, memory.ring_slots, self._budget, self._stream
        )
        buffer = self._budget.buffer("KV", memory.kv_bytes)
        if memory.kv == "pages":
            self.kv = DevicePagesKV(self._store, buffer, self._stream)
        else:
            self.kv = LayerStreamKV(self._store, buffer, self._stream)
        self._phase = phase

    def close(self) -> None:
        self._stream.close()
