"""What the engine asks of the KV of running sequences, wherever it lies."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from hpcgen.kernels.attention.interface import KVPages
from hpcgen.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a sequence that a forward pass adds to its KV."""

    sequence: Sequence
    start: int
    stop: int


class KVAccess(Protocol):
    """KV of the sequences of one microbatch during one forward pass."""

    @property
    def tables(self) -> list[list[int]]:
        """Pages of each span's sequence, as the attention backend is to see them."""

    def kv(self, layer: int) -> KVPages:
        """Pages of one layer, ready to read and write."""

    def layer_done(self, layer: int) -> None:
        """Attention of this layer has been given to the device."""


class KVPlacement(Protocol):
    """Keeps KV where the device can use it, and the host store true to it."""

    max_sequence_pages: int
    """Most pages that one sequence may come to need."""
    microbatch_pages: int
    """Most pages that the sequences of one microbatch may have."""
    stable: bool
    """Whether `table` stays as it is while a sequence is not extended; else it is made for each forward pass."""

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Gives the sequence pages for its first `tokens` tokens."""

    def resume(self, sequence: Sequence) -> None:
        """Part of COMBINE: its KV can be used on the device from now on."""

    def suspend(self, sequence: Sequence) -> None:
        """Part of YIELD: its KV is in the host store, and the device is released."""

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended or lost its KV: its pages are free on the device and in the host store."""

    def table(self, sequence: Sequence) -> list[int]:
        """Pages of a sequence as the attention backend is to see them, where they are `stable`."""

    def access(self, microbatches: Seq[Seq[Span]]) -> Seq[KVAccess]:
        """Opens a forward pass over microbatches that run in this order at every layer."""

    def advanced(self, sequence: Sequence) -> None:
        """`sequence.kv_length` has grown: filled pages may be written behind."""

    def settle(self) -> None:
        """What was written behind so far is in the host store when this returns."""
