"""The KV side of the host store: pages of all sequences of a node, and which of them are free."""

import mmap
from collections.abc import Iterable
from typing import Protocol

import torch

from hpcgen.errors import HpcgenError
from hpcgen.kernels.attention.interface import KVPages
from hpcgen.kernels.attention.kv_layout import KVLayout


class HostStoreFull(RuntimeError):
    """More pages were asked for than are free. The scheduler never plans that; it is an error of the program."""


class FreePages(Protocol):
    """Which pages of a host store are free."""

    def __len__(self) -> int: ...

    def take(self, count: int) -> list[int]:
        """Raises HostStoreFull."""

    def give(self, pages: Iterable[int]) -> None: ...


class OwnFreePages:
    """Free pages of a store that one process has for itself. Freed ones are reused first, while they are warm in the
    cache and already backed by memory."""

    def __init__(self, count: int):
        self._count = count
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise HostStoreFull(f"{count} pages asked for, {len(self._free)} of {self._count} are free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken[::-1]

    def give(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)


class HostStore:
    """`count` pages of KV in host memory, zero-filled and touched only when used.

    `pages` is uint8 [count, page_bytes]; row p is page p.
    """

    def __init__(self, layout: KVLayout, count: int, buffer: torch.Tensor | None = None, free: FreePages | None = None):
        """`buffer`: uint8 memory of count * page_bytes to live in, and `free` its free pages, where the ranks of a
        node share both. None: own memory."""
        if count < 1:
            need = f"{layout.page_bytes / 2**20:.2f} MiB"
            raise HpcgenError(f"The host store has no room for one page of KV ({need}). Raise --host-memory.")
        self.layout = layout
        memory = _anonymous(count * layout.page_bytes) if buffer is None else buffer
        self.pages = memory.view(count, layout.page_bytes)
        self._free: FreePages = OwnFreePages(count) if free is None else free
        self._layers = layout.views(self.pages)
        self._pinned = False

    @property
    def count(self) -> int:
        return len(self.pages)

    @property
    def free(self) -> int:
        """Pages that no sequence owns."""
        return len(self._free)

    def layer(self, index: int) -> KVPages:
        """K and V of one layer of all pages, as views."""
        return self._layers[index]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages. Raises HostStoreFull."""
        return self._free.take(count)

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back."""
        self._free.give(pages)

    def pin(self) -> None:
        """Registers the memory with CUDA, once, so that copies to and from the device are asynchronous."""
        if self._pinned:
            return
        result = torch.cuda.cudart().cudaHostRegister(self.pages.data_ptr(), self.pages.numel(), 0)
        if int(result) != 0:
            raise HpcgenError(f"cudaHostRegister of {self.pages.numel()} bytes failed ({result}); check `ulimit -l`.")
        self._pinned = True


def _anonymous(nbytes: int) -> torch.Tensor:
    """Zeroed memory that the kernel backs on first touch, with huge pages where it allows them."""
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)
