import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.layouts import PANELS, StoredTensor, pack


def fp8(*shape) -> StoredTensor:
    *batch, rows, columns = shape
    scale = torch.rand(*batch, -(-rows // 128), -(-columns // 128))
    return StoredTensor(torch.randn(shape).to(torch.float8_e4m3fn), shape, "fp8-block", scale, (128, 128))


def mxfp4() -> StoredTensor:
    blocks = torch.randint(0, 256, (3, 64, 2, 16), dtype=torch.uint8)
    return StoredTensor(blocks, (3, 64, 64), "mxfp4", torch.randint(100, 140, (3, 64, 2), dtype=torch.uint8), (1, 32))


def test_fp8_blocks_are_bitwise_those_of_transformers():
    stored = fp8(3, 256, 384)
    expected = Fp8Dequantize(None)._dequantize_one(stored.data, stored.scale, torch.bfloat16)
    assert torch.equal(dequantize(stored, torch.bfloat16), expected)


def test_fp8_blocks_at_the_edge_may_be_cut():
    stored = fp8(200, 130)
    rows, columns = torch.arange(200) // 128, torch.arange(130) // 128
    expected = stored.data.float() * stored.scale[rows][:, columns]
    assert torch.equal(dequantize(stored, torch.float32), expected)


def test_mxfp4_is_bitwise_that_of_transformers():
    stored = mxfp4()
    expected = convert_moe_packed_tensors(stored.data, stored.scale)
    assert torch.equal(dequantize(stored, torch.bfloat16), expected)


@pytest.mark.parametrize(
    "stored", [fp8(3, 128, 256), mxfp4(), pack(torch.randn(3, 32, 64).bfloat16(), PANELS)], ids=lambda s: s.layout
)
def test_one_expert_is_that_part_of_all(stored):
    assert torch.equal(dequantize(stored, torch.bfloat16, 1), dequantize(stored, torch.bfloat16)[1])
