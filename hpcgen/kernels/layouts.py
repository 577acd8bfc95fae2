"""How a weight lies in memory: its logical shape, and the layout and quantisation that a kernel reads it in."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight as it lies in the weight file or in a ring slot: bytes, and how to read them.

    `data` of a plain tensor has the logical shape and dtype. A packed or quantised one has another shape,
    so that code that takes it for a plain one fails instead of computing nonsense.
    """

    data: torch.Tensor
    shape: tuple[int, ...]
    """Logical shape, that of the transformers parameter."""
    layout: str = "plain"
    """'plain', 'fp8-block' (float8_e4m3fn data, `scale` per block), 'mxfp4' (uint8 blocks, `scale` uint8 exponents),
    or a packing of `kernels`."""
    scale: torch.Tensor | None = None
    block: tuple[int, int] | None = None
    """Rows and columns that share one scale."""


def slice_expert(stored: StoredTensor, expert: int) -> StoredTensor:
    """Expert `expert` of a stack [E, ...], without copying. Its scales go with it."""
    return replace(
        stored,
        data=stored.data[expert],
        shape=stored.shape[1:],
        scale=None if stored.scale is None else stored.scale[expert],
    )


def unpack(stored: StoredTensor) -> torch.Tensor:
    """The plain tensor, in its logical shape; a plain one is returned as it is.

    Raises ValueError for a quantised one: see `kernels.dequantize`.
    """
    if stored.layout == "plain":
        return stored.data
    raise ValueError(f"no unpacking for layout {stored.layout!r}")
