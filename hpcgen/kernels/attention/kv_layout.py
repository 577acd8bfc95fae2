"""Shape of the KV-cache of a model, and how a page of it lies in memory.

A page holds PAGE_TOKENS tokens of one sequence in all layers: layer after layer, in each the `first` block
[N, heads, dim] and then the `second` one. Host store, device and checkpoint use the same layout, so that
MIGRATE, YIELD and a checkpoint each move a page as one run of bytes.
"""

from dataclasses import dataclass

import torch

from hpcgen.kernels.attention.interface import KVPages
from hpcgen.sequence import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`first` is K, or the MLA latent; `second` is V, or the MLA rotary key."""

    layers: int
    first_heads: int
    first_dim: int
    second_heads: int
    second_dim: int
    dtype: torch.dtype

    @property
    def first_elements(self) -> int:
        """Elements of the first block of one layer of a page."""
        return PAGE_TOKENS * self.first_heads * self.first_dim

    @property
    def layer_elements(self) -> int:
        return self.first_elements + PAGE_TOKENS * self.second_heads * self.second_dim

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a page."""
        return self.layer_elements * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_bytes

    def views(self, pages: torch.Tensor) -> list[KVPages]:
        """KVPages of each layer as views into `pages`, uint8 [P, page_bytes], contiguous."""
        typed = pages.view(self.dtype)
        return [self.layer_view(typed, layer * self.layer_elements) for layer in range(self.layers)]

    def layer_view(self, typed: torch.Tensor, offset: int = 0) -> KVPages:
        """KVPages of the layer that begins `offset` elements into each row of `typed`, [P, elements] of `dtype`."""
        count, stride = len(typed), typed.stride(0)
        begin = typed.storage_offset() + offset

        def block(start: int, heads: int, dim: int) -> torch.Tensor:
            return torch.as_strided(
                typed, (count, PAGE_TOKENS, heads, dim), (stride, heads * dim, dim, 1), begin + start
            )

        return KVPages(
            block(0, self.first_heads, self.first_dim), block(self.first_elements, self.second_heads, self.second_dim)
        )
