"""How checkpoints are quantised: which tensors belong together, and how their scales are merged with them.

Quantised weights stay quantised in the weight file. `kernels.dequantize` gives their values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

import torch

from hpcgen.model.errors import ModelError

FP8_SCALE: Final = "_scale_inv"
"""DeepSeek-V3: `W.weight` float8_e4m3fn has `W.weight_scale_inv`, one scale for each block."""
FP8_ACTIVATION_SCALE: Final = ".activation_scale"
"""Static scales of activations, which a kernel that computes in bf16 does not need."""
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""GPT-OSS: parameter `P` [E, K, N] is `P_blocks` [E, N, K / 32, 16] and `P_scales` [E, N, K / 32]."""
MXFP4_BLOCK: Final = (32, 1)
"""Rows and columns of the logical [K, N] that share a scale."""


@dataclass(frozen=True)
class Quantization:
    """The scheme of a checkpoint."""

    layout: str
    """'fp8-block' or 'mxfp4', as in `StoredTensor`."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None if a whole matrix does."""


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """The scheme that config.json names; None for a model that is not quantised.

    Raises:
        ModelError: a scheme that is not supported.
    """
    described = config.get("quantization_config")
    if not described:
        return None
    method = described.get("quant_method")
    if method == "mxfp4":
        return Quantization("mxfp4", MXFP4_BLOCK)
    if method == "fp8" and described.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
        block = described.get("weight_block_size")
        return Quantization("fp8-block", (block[0], block[1]) if block else None)
    raise ModelError(
        f"The checkpoint is quantised by '{method}', which is not supported: use the unquantised checkpoint, or one "
        "in DeepSeek's block-wise fp8 (quant_method 'fp8', fmt 'e4m3') or MXFP4."
    )


def scale_key(key: str, quantization: Quantization | None, keys: Mapping[str, Any]) -> str | None:
    """The key of the scales that belong to the quantised tensor `key`; None if it is plain."""
    if quantization is None:
        return None
    if quantization.layout == "mxfp4":
        candidate = key.removesuffix(MXFP4_BLOCKS) + MXFP4_SCALES if key.endswith(MXFP4_BLOCKS) else None
    else:
        candidate = key + FP8_SCALE
    return candidate if candidate in keys else None


def is_companion(key: str, quantization: Quantization | None, keys: Mapping[str, Any]) -> bool:
    """Whether `key` only completes another tensor, and is no parameter of its own."""
    if quantization is None:
        return False
    if quantization.layout == "mxfp4":
        return key.endswith(MXFP4_SCALES) and key.removesuffix(MXFP4_SCALES) + MXFP4_BLOCKS in keys
    if key.endswith(FP8_ACTIVATION_SCALE):
        return True
    return key.endswith(FP8_SCALE) and key.removesuffix(FP8_SCALE) in keys


def parameter_key(key: str, quantization: Quantization | None) -> str:
    """The key that an unquantised checkpoint would have."""
    if quantization is not None and quantization.layout == "mxfp4":
        return key.removesuffix(MXFP4_BLOCKS)
    return key


def scale_entry_key(name: str, layout: str) -> str:
    """What the scales of weight `name` are called in the weight file: as transformers calls them."""
    return name + (MXFP4_SCALES if layout == "mxfp4" else FP8_SCALE)


def data_entry_key(name: str, layout: str) -> str:
    return name + MXFP4_BLOCKS if layout == "mxfp4" else name


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int]:
    """Shape of the scales of one matrix [R, C]; the last blocks may be partial."""
    rows, columns = block if block is not None else shape[-2:]
    return -(-shape[-2] // rows), -(-shape[-1] // columns)


def common_block(block: tuple[int, int] | None, shapes: Iterable[tuple[int, ...]]) -> tuple[int, int]:
    """The largest block that describes the scales of all these matrices [R, C] after they are stacked by rows.

    Where a block's rows do not divide those of a matrix, its last block is a partial one, and blocks of the matrix
    that is stacked below no longer start at multiples of the block. Smaller blocks (with repeated scales) do.
    """
    shapes = list(shapes)
    columns = shapes[0][-1]
    rows, block_columns = block if block is not None else (shapes[0][-2], columns)
    if len(shapes) > 1:
        for shape in shapes:
            rows = gcd(rows, shape[-2])
    return rows, block_columns


def refine_scale(
    scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int] | None, target: tuple[int, int]
) -> torch.Tensor:
    """Scales for blocks of `target` rows, which divide those of `block`.

    Args:
        scale: of one matrix [R, C]: a scalar, or [ceil(R / block rows), ceil(C / block columns)].

    Returns:
        [ceil(R / target rows), ceil(C / block columns)]
    """
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    rows = block[0] if block is not None else shape[-2]
    return scale.repeat_interleave(rows // target[0], 0)[: -(-shape[-2] // target[0])].contiguous()


def coarsen_scale(scale: torch.Tensor, block: tuple[int, int], target: tuple[int, int] | None) -> torch.Tensor:
    """What `refine_scale` was given: one of every scales of `block` rows that it repeated for `target` rows."""
    if target is None:
        return scale[:1, :1].reshape(()).clone()
    return scale[:: target[0] // block[0]].contiguous().clone()
