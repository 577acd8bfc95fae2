"""MIGRATE: moves a sequence's KV from one host store to another, whole pages, verified before it changes hands.

The destination pulls. Until the checksums agree the sequence is the source's, so a failure costs a copy and no KV.
"""

import zlib
from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from hpcgen.memory.host_store import HostStore
from hpcgen.sequence import Sequence, pages_for


class MigrationFailed(RuntimeError):
    """The pages did not arrive, or not as they were sent. The source still has them."""


class PageTransfer(Protocol):
    """Reads pages of a host store that may be on another node."""

    def pull(self, pages: Seq[int], into: torch.Tensor) -> None:
        """Copies the source's `pages` to the rows of `into`, uint8 [len(pages), page_bytes]; returns when done.
        Raises MigrationFailed."""

    def checksums(self, pages: Seq[int]) -> list[int]:
        """CRC-32 of each page, computed at the source."""


class LocalTransfer:
    """Between two host stores of one process."""

    def __init__(self, source: HostStore):
        self._source = source

    def pull(self, pages: Seq[int], into: torch.Tensor) -> None:
        torch.index_select(self._source.pages, 0, torch.tensor(pages), out=into)

    def checksums(self, pages: Seq[int]) -> list[int]:
        return [page_checksum(self._source, page) for page in pages]


def page_checksum(store: HostStore, page: int) -> int:
    """CRC-32 of one page of KV."""
    return zlib.crc32(store.pages[page].numpy().data)


def migrate(sequence: Sequence, source: HostStore, destination: HostStore, transfer: PageTransfer) -> None:
    """Moves a suspended sequence's KV into `destination`; then its pages at `source` are free.

    Raises HostStoreFull where the destination has no room, MigrationFailed where a page did not arrive whole; the
    sequence is then as it was.
    """
    count = pages_for(sequence.kv_length)
    old, new = sequence.pages[:count], destination.allocate(count)
    try:
        received = torch.empty(count, destination.layout.page_bytes, dtype=torch.uint8)
        transfer.pull(old, received)
        destination.pages[torch.tensor(new, dtype=torch.int64)] = received
        arrived = [page_checksum(destination, page) for page in new]
        damaged = [page for page, a, b in zip(old, arrived, transfer.checksums(old), strict=True) if a != b]
        if damaged:
            raise MigrationFailed(f"sequence {sequence.id}: page {damaged[0]} arrived with another checksum")
    except BaseException:
        destination.release(new)
        raise
    source.release(sequence.pages)
    sequence.pages = new
