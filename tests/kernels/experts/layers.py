"""Random experts for the tests, plain and packed."""

from dataclasses import replace

import torch

from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.experts.interface import ExpertWeights
from hpcgen.kernels.layouts import StoredTensor, choose_layout, pack


def experts(count, hidden, intermediate, activation="silu", bias=False, first=0, dtype=torch.bfloat16) -> ExpertWeights:
    """GPT-OSS's form (transposed, interleaved) for its activation, that of the others else."""
    generator = torch.Generator().manual_seed(count)
    gpt_oss = activation == "swiglu_oai"

    def weight(rows, columns):
        plain = (torch.randn(count, rows, columns, generator=generator) * columns**-0.5).to(dtype)
        plain = plain.mT.contiguous() if gpt_oss else plain
        return StoredTensor(plain, tuple(plain.shape))

    return ExpertWeights(
        gate_up=weight(2 * intermediate, hidden),
        down=weight(hidden, intermediate),
        gate_up_bias=torch.randn(count, 2 * intermediate, generator=generator).to(dtype) if bias else None,
        down_bias=torch.randn(count, hidden, generator=generator).to(dtype) if bias else None,
        transposed=gpt_oss,
        interleaved=gpt_oss,
        activation=activation,
        first=first,
    )


def packed(weights: ExpertWeights) -> ExpertWeights:
    kind = "experts-transposed" if weights.transposed else "experts"

    def pack_one(stored: StoredTensor) -> StoredTensor:
        return pack(stored.data, choose_layout(kind, stored.shape, stored.data.dtype))

    return replace(weights, gate_up=pack_one(weights.gate_up), down=pack_one(weights.down))


def quantised(weights: ExpertWeights) -> ExpertWeights:
    """Random ones in the stored form of DeepSeek-V3 (fp8 blocks) or, for GPT-OSS's form, in MXFP4."""
    return replace(
        weights,
        gate_up=random_quantised(weights.gate_up.shape, weights.transposed),
        down=random_quantised(weights.down.shape, weights.transposed),
    )


def random_quantised(shape: tuple[int, ...], transposed: bool = False) -> StoredTensor:
    if transposed:
        *experts, inner, rows = shape
        blocks = torch.randint(0, 256, (*experts, rows, inner // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(120, 126, (*experts, rows, inner // 32), dtype=torch.uint8)
        return StoredTensor(blocks, shape, "mxfp4", exponents)
    *experts, rows, inner = shape
    scale = torch.rand(*experts, -(-rows // 48), -(-inner // 64)) * inner**-0.5
    return StoredTensor(torch.randn(shape).to(torch.float8_e4m3fn), shape, "fp8-block", scale, (48, 64))


def in_fp32(weights: ExpertWeights) -> ExpertWeights:
    """The same rounded weights, to compute with exactly."""
    return replace(
        weights,
        gate_up=StoredTensor(dequantize(weights.gate_up, torch.bfloat16).float(), weights.gate_up.shape),
        down=StoredTensor(dequantize(weights.down, torch.bfloat16).float(), weights.down.shape),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias.float(),
        down_bias=None if weights.down_bias is None else weights.down_bias.float(),
    )


def routing(tokens, top_k, experts) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    return index, torch.rand(tokens, top_k).softmax(1)
