"""KV used in place in the host store: a CPU without a device budget copies nothing."""

from collections.abc import Sequence as Seq

from hpcgen.memory.host_store import HostStore
from hpcgen.memory.kv.interface import KVAccess, Span
from hpcgen.sequence import Sequence, pages_for


class _Access:
    def __init__(self, store: HostStore, spans: Seq[Span]):
        self.kv = store.layer
        self.tables = [span.sequence.pages for span in spans]

    def layer_done(self, layer: int) -> None:
        """The host store itself was written."""


class InPlaceKV:
    """The host store is the device's memory too."""

    stable = True

    def __init__(self, store: HostStore):
        self._store = store
        self.max_sequence_pages = self.microbatch_pages = store.count

    def extend(self, sequence: Sequence, tokens: int) -> None:
        sequence.pages += self._store.allocate(max(0, pages_for(tokens) - len(sequence.pages)))

    def resume(self, sequence: Sequence) -> None:
        """It is where it is used."""

    def suspend(self, sequence: Sequence) -> None:
        """It is where it is kept."""

    def drop(self, sequence: Sequence) -> None:
        self._store.release(sequence.pages)
        sequence.pages = []
        sequence.kv_length = 0

    def table(self, sequence: Sequence) -> list[int]:
        return sequence.pages

    def access(self, microbatches: Seq[Seq[Span]]) -> Seq[KVAccess]:
        return [_Access(self._store, spans) for spans in microbatches]

    def advanced(self, sequence: Sequence) -> None:
        """Pages fill where they are kept."""

    def settle(self) -> None:
        """It is where it is kept."""
