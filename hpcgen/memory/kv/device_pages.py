"""Paged KV on the device for decode: whole pages come from the host store at COMBINE, and go back as they fill.

Because filled pages are written behind, YIELD has only the last page to write (paper §4.2).
"""

from collections.abc import Sequence as Seq

import torch

from hpcgen.kernels.attention.interface import KVPages
from hpcgen.memory.host_store import HostStore
from hpcgen.memory.kv.interface import KVAccess, Span
from hpcgen.memory.streams import CopyStream
from hpcgen.sequence import PAGE_TOKENS, Sequence, pages_for


class DevicePagesFull(RuntimeError):
    """More device pages were asked for than are free. The scheduler never plans that; it is an error of the program."""


class _Access:
    def __init__(self, layers: list[KVPages], tables: list[list[int]]):
        self._layers = layers
        self.tables = tables

    def kv(self, layer: int) -> KVPages:
        return self._layers[layer]

    def layer_done(self, layer: int) -> None:
        """Pages are written behind when they are full, by `advanced`."""


class DevicePagesKV:
    """`buffer`, uint8 on the device, holds as many pages as fit."""

    stable = True

    def __init__(self, store: HostStore, buffer: torch.Tensor, stream: CopyStream):
        page_bytes = store.layout.page_bytes
        self.count = self.max_sequence_pages = self.microbatch_pages = buffer.numel() // page_bytes
        self._store, self._stream = store, stream
        self._pages = buffer[: self.count * page_bytes].view(self.count, page_bytes)
        self._layers = store.layout.views(self._pages)
        self._free = list(range(self.count - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}
        self._written: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def extend(self, sequence: Sequence, tokens: int) -> None:
        sequence.pages += self._store.allocate(max(0, pages_for(tokens) - len(sequence.pages)))
        table = self._tables[sequence.id]
        table += self._allocate(max(0, pages_for(tokens) - len(table)))

    def resume(self, sequence: Sequence) -> None:
        count = pages_for(sequence.kv_length)
        table = self._tables[sequence.id] = self._allocate(count)
        pairs = [(self._pages[d], self._store.pages[h]) for d, h in zip(table, sequence.pages[:count], strict=True)]
        self._stream.copy(pairs).wait()
        self._written[sequence.id] = sequence.kv_length // PAGE_TOKENS

    def suspend(self, sequence: Sequence) -> None:
        self._write_back(sequence, pages_for(sequence.kv_length))
        self._stream.synchronize()
        self._free += self._tables.pop(sequence.id)
        del self._written[sequence.id]

    def drop(self, sequence: Sequence) -> None:
        if sequence.id in self._tables:
            # A copy of a filled page may still be under way; its page must not change hands before it is done.
            self._stream.synchronize()
            self._free += self._tables.pop(sequence.id)
            del self._written[sequence.id]
        self._store.release(sequence.pages)
        sequence.pages = []
        sequence.kv_length = 0

    def table(self, sequence: Sequence) -> list[int]:
        return self._tables[sequence.id]

    def access(self, microbatches: Seq[Seq[Span]]) -> Seq[KVAccess]:
        return [_Access(self._layers, [self._tables[span.sequence.id] for span in spans]) for spans in microbatches]

    def advanced(self, sequence: Sequence) -> None:
        if sequence.kv_length // PAGE_TOKENS > self._written[sequence.id]:
            self._write_back(sequence, sequence.kv_length // PAGE_TOKENS)

    def settle(self) -> None:
        self._stream.synchronize()

    def _write_back(self, sequence: Sequence, stop: int) -> None:
        """Copies pages [written, stop) to the host store."""
        start = self._written[sequence.id]
        table = self._tables[sequence.id]
        self._stream.copy([(self._store.pages[sequence.pages[i]], self._pages[table[i]]) for i in range(start, stop)])
        self._written[sequence.id] = max(start, sequence.kv_length // PAGE_TOKENS)

    def _allocate(self, count: int) -> list[int]:
        if count > len(self._free):
            raise DevicePagesFull(f"{count} pages asked for, {len(self._free)} of {self.count} are free")
        return [self._free.pop() for _ in range(count)]
