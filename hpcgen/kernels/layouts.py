"""How a weight lies in memory: its logical shape, and the layout and quantisation that a kernel reads it in."""

from dataclasses import dataclass, replace
from typing import Literal

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
    or a packing: PANELS, PANELS_TRANSPOSED."""
    scale: torch.Tensor | None = None
    block: tuple[int, int] | None = None
    """Rows and columns that share one scale."""


PANEL_COLUMNS = 32
PANELS = "panels32"
"""bf16 of a weight [..., N, K] as [..., N / 32, K / 2, 32, 2]: panels of 32 outputs, in each the pairs along K that
bf16 dot products take (AMX tiles and AVX-512 alike). As many bytes as the plain weight."""
PANELS_TRANSPOSED = "panels32-transposed"
"""The same of a weight that transformers holds as [..., K, N] (GPT-OSS's experts)."""


def choose_layout(
    kind: Literal["linear", "experts", "experts-transposed"], shape: tuple[int, ...], dtype: torch.dtype
) -> str:
    """The layout that the CPU kernels compute fastest with: packed for bf16 whose dimensions divide, else 'plain'.

    `shape` is that of the transformers parameter: [N, K], [E, N, K], or [E, K, N] for 'experts-transposed'.
    """
    if dtype != torch.bfloat16 or any(size % PANEL_COLUMNS for size in shape[-2:]):
        return "plain"
    return PANELS_TRANSPOSED if kind == "experts-transposed" else PANELS


def pack(tensor: torch.Tensor, layout: str) -> StoredTensor:
    """The plain `tensor` in `layout`, in new memory; as it is for 'plain'."""
    shape = tuple(tensor.shape)
    if layout == "plain":
        return StoredTensor(tensor, shape)
    if layout not in (PANELS, PANELS_TRANSPOSED):
        raise ValueError(f"no packing for layout {layout!r}")
    rows = tensor.mT if layout == PANELS_TRANSPOSED else tensor  # [..., N, K]
    panels = rows.unflatten(-2, (-1, PANEL_COLUMNS)).unflatten(-1, (-1, 2)).transpose(-3, -2)
    return StoredTensor(panels.contiguous(), shape, layout)


def slice_expert(stored: StoredTensor, expert: int) -> StoredTensor:
    """Expert `expert` of a stack [E, ...], without copying. Its scales go with it."""
    return replace(
        stored,
        data=stored.data[expert],
        shape=stored.shape[1:],
        scale=None if stored.scale is None else stored.scale[expert],
    )


def take_rows(stored: StoredTensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows `rows` (int64 [...]) of a weight [N, K] -> [..., K]. Raises ValueError for a quantised one."""
    if stored.layout == "plain":
        return stored.data[rows]
    if stored.layout != PANELS:
        raise ValueError(f"rows of layout {stored.layout!r} cannot be taken")
    pairs = stored.data.view(torch.int32)[..., 0]  # [N / 32, K / 2, 32]
    taken = pairs[rows // PANEL_COLUMNS, :, rows % PANEL_COLUMNS]  # [..., K / 2]
    return taken.view(stored.data.dtype)


def unpack(stored: StoredTensor) -> torch.Tensor:
    """The plain tensor, in its logical shape; a plain one is returned as it is.

    Raises ValueError for a quantised one: see `kernels.dequantize`.
    """
    if stored.layout == "plain":
        return stored.data
    if stored.layout in (PANELS, PANELS_TRANSPOSED):
        rows = stored.data.transpose(-3, -2).flatten(-2).flatten(-3, -2)  # [..., N, K]
        return (rows.mT if stored.layout == PANELS_TRANSPOSED else rows).contiguous()
    raise ValueError(f"no unpacking for layout {stored.layout!r}")
