"""Quantised weights to plain ones, bitwise equal to what transformers makes of the same checkpoint at load.

fp8: DeepSeek-V3 §3.3 (float8_e4m3fn, one fp32 scale per block of 128 x 128). MXFP4: OCP Microscaling Formats v1.0
(two e2m1 values a byte, the low nibble first; one power of two for 32 of them).
"""

import torch

from hpcgen.kernels.layouts import StoredTensor, slice_expert, unpack

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127


def dequantize(stored: StoredTensor, dtype: torch.dtype, expert: int | None = None) -> torch.Tensor:
    """The weight in its logical shape and `dtype`, or only `expert` of it (one dimension less).

    Multiplies in fp32 and rounds once. Plain and packed weights are unpacked and cast.
    """
    if expert is not None:
        stored = slice_expert(stored, expert)
    if stored.layout == "fp8-block":
        return _dequantize_fp8(stored, dtype)
    if stored.layout == "mxfp4":
        return _dequantize_mxfp4(stored, dtype)
    return unpack(stored).to(dtype)


def _scale_in_fp32(scale: torch.Tensor) -> torch.Tensor:
    """Scales as multipliers; bytes are e8m0 exponents."""
    if scale.dtype == torch.uint8:
        return (scale.float() - E8M0_BIAS).exp2()
    return scale.float()


def _dequantize_fp8(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    assert stored.scale is not None and stored.block is not None
    *_, rows, columns = stored.shape
    block_rows, block_columns = stored.block
    scale = _scale_in_fp32(stored.scale)  # [..., ceil(rows / block_rows), ceil(columns / block_columns)]
    if rows % block_rows or columns % block_columns:
        scale = scale.repeat_interleave(block_rows, -2)[..., :rows, :]
        scale = scale.repeat_interleave(block_columns, -1)[..., :columns]
        return (stored.data.float() * scale).to(dtype)
    blocked = stored.data.float().unflatten(-1, (-1, block_columns)).unflatten(-3, (-1, block_rows))
    return (blocked * scale[..., :, None, :, None]).to(dtype).view(stored.shape)


def _dequantize_mxfp4(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """Blocks [..., N, K / 32, 16] and scales [..., N, K / 32] -> [..., K, N], GPT-OSS's transposed parameters."""
    assert stored.scale is not None
    values = torch.tensor(E2M1_VALUES, device=stored.data.device)
    pairs = torch.stack([values[(stored.data & 15).int()], values[(stored.data >> 4).int()]], -1).flatten(-2)
    weight = (pairs * _scale_in_fp32(stored.scale)[..., None]).flatten(-2)  # [..., N, K]
    return weight.transpose(-1, -2).to(dtype).contiguous()
