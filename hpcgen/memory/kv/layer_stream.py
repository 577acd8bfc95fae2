"""KV streamed by layer: the device holds at most two layers' KV of a microbatch.

Used for prefill, where each layer's K and V go to the host pages at once (paper §5.1), and for decode where not even
the KV of one sequence in all layers fits the device. While one buffer is in use the other is filled for the
microbatch that comes next.
"""

from collections.abc import Sequence as Seq

import torch

from hpcgen.errors import HpcgenError
from hpcgen.kernels.attention.interface import KVPages
from hpcgen.memory.host_store import HostStore
from hpcgen.memory.kv.in_place import InPlaceKV
from hpcgen.memory.kv.interface import KVAccess, Span
from hpcgen.memory.streams import CopyPair, CopyStream, Event
from hpcgen.sequence import PAGE_TOKENS, Sequence, pages_for


class _Slot:
    """KV of one layer of one microbatch on the device."""

    def __init__(self, rows: torch.Tensor, pages: KVPages):
        self.rows = rows
        self.pages = pages
        self.holds: tuple[int, int] | None = None
        self.loaded: Event | None = None


class _Access:
    """One microbatch: its pages are numbered from 0 in the buffer, sequence after sequence."""

    def __init__(self, placement: "LayerStreamKV", index: int, spans: Seq[Span]):
        self.tables: list[list[int]] = []
        self.sequences = {span.sequence.id for span in spans}
        self.load: list[tuple[int, int]] = []
        self.store: list[tuple[int, int]] = []
        self._placement, self._index = placement, index
        used = 0
        for span in spans:
            count = pages_for(span.stop)
            table = list(range(used, used + count))
            used += count
            self.tables.append(table)
            host = span.sequence.pages
            self.load += [(table[i], host[i]) for i in range(pages_for(span.start))]
            self.store += [(table[i], host[i]) for i in range(span.start // PAGE_TOKENS, count)]
        if used > placement.buffer_pages:
            raise HpcgenError(f"A microbatch needs {used} pages of KV, the buffer holds {placement.buffer_pages}.")

    def kv(self, layer: int) -> KVPages:
        return self._placement.open(layer, self._index)

    def layer_done(self, layer: int) -> None:
        self._placement.close(layer, self._index)


class LayerStreamKV(InPlaceKV):
    """`buffer`, uint8 on the device, is halved into two layers' pages. The host store holds all KV at all times."""

    stable = False

    def __init__(self, store: HostStore, buffer: torch.Tensor, stream: CopyStream):
        super().__init__(store)
        layout = store.layout
        self.buffer_pages = self.max_sequence_pages = self.microbatch_pages = buffer.numel() // 2 // layout.layer_bytes
        self._layout, self._stream = layout, stream
        self._slots = []
        for half in range(2):
            start = half * self.buffer_pages * layout.layer_bytes
            rows = buffer[start : start + self.buffer_pages * layout.layer_bytes].view(self.buffer_pages, -1)
            self._slots.append(_Slot(rows, layout.layer_view(rows.view(layout.dtype))))
        self._accesses: list[_Access] = []

    def access(self, microbatches: Seq[Seq[Span]]) -> Seq[KVAccess]:
        self._accesses = [_Access(self, index, spans) for index, spans in enumerate(microbatches)]
        for slot in self._slots:
            slot.holds = None
        return self._accesses

    def open(self, layer: int, index: int) -> KVPages:
        """KV of a layer of a microbatch; starts to load that of the next microbatch where it is already complete."""
        slot = self._slot_of(layer, index) or self._load(layer, index)
        if slot.loaded is not None:
            slot.loaded.wait()
            slot.loaded = None
        following = (layer, index + 1) if index + 1 < len(self._accesses) else (layer + 1, 0)
        if following[0] < self._layout.layers and not self._waits_for(following, (layer, index)):
            self._load(*following)
        return slot.pages

    def close(self, layer: int, index: int) -> None:
        """Writes the new tokens' KV of a layer to the host pages. Copies keep their order, so a later load sees it."""
        slot = self._slot_of(layer, index)
        assert slot is not None
        self._stream.copy([(row, page) for page, row in self._pairs(slot, layer, self._accesses[index].store)])

    def suspend(self, sequence: Sequence) -> None:
        self._stream.synchronize()

    def settle(self) -> None:
        self._stream.synchronize()

    def drop(self, sequence: Sequence) -> None:
        # Its last pages may still be on their way to the host store.
        self._stream.synchronize()
        super().drop(sequence)

    def _slot_of(self, layer: int, index: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.holds == (layer, index)), None)

    def _waits_for(self, following: tuple[int, int], current: tuple[int, int]) -> bool:
        """Whether a prompt that spans both microbatches makes the following one read what the current one writes."""
        if following == current or self._slot_of(*following) is not None:
            return True
        same_layer = following[0] == current[0]
        return same_layer and bool(self._accesses[following[1]].sequences & self._accesses[current[1]].sequences)

    def _load(self, layer: int, index: int) -> _Slot:
        # Layers and microbatches come in rising order: the smallest is the one that is done with.
        slot = min(self._slots, key=lambda s: s.holds or (-1, -1))
        slot.holds = (layer, index)
        slot.loaded = self._stream.copy(self._pairs(slot, layer, self._accesses[index].load))
        return slot

    def _pairs(self, slot: _Slot, layer: int, pages: list[tuple[int, int]]) -> list[CopyPair]:
        """(device row, host bytes) of one layer of each page."""
        start, stop = layer * self._layout.layer_bytes, (layer + 1) * self._layout.layer_bytes
        return [(slot.rows[local], self._store.pages[host, start:stop]) for local, host in pages]
