from dataclasses import replace

import pytest
import torch

from hpcgen.kernels.experts.grouped import GroupedExperts
from hpcgen.kernels.experts.torch_reference import TorchExperts
from tests.kernels.experts.layers import experts, in_fp32, packed, routing

REFERENCE = TorchExperts()


def close(weights, hidden, index, weight, first_weights=None):
    out = GroupedExperts().forward(weights, hidden, index, weight).float()
    expected = REFERENCE.forward(in_fp32(first_weights or weights), hidden.float(), index, weight)
    return (out - expected).abs().max() <= 1.5e-2 * expected.abs().max()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("tokens", [1, 9, 60])
def test_equals_the_reference(activation, tokens):
    weights = experts(6, 64, 32, activation, bias=activation == "swiglu_oai")
    hidden, (index, weight) = torch.randn(tokens, 64).bfloat16(), routing(tokens, 3, 6)
    assert close(weights, hidden, index, weight)


def test_experts_of_other_ranks_and_unused_ones_add_nothing():
    weights = experts(4, 64, 32, first=3)
    weights.gate_up.data[3] = float("nan")
    hidden, (index, weight) = torch.randn(30, 64).bfloat16(), routing(30, 3, 6)
    assert close(weights, hidden, index, weight)


def test_packed_weights_are_taken():
    weights = experts(4, 64, 32)
    hidden, (index, weight) = torch.randn(8, 64).bfloat16(), routing(8, 2, 4)
    assert close(packed(weights), hidden, index, weight, weights)


def test_no_tokens_give_no_rows():
    hidden, (index, weight) = torch.empty(0, 64).bfloat16(), routing(0, 2, 4)
    assert GroupedExperts().forward(experts(4, 64, 32), hidden, index, weight).shape == (0, 64)


def test_quantised_weights_go_to_the_reference():
    weights = experts(2, 128, 128)
    scale = torch.rand(2, 2, 1)
    quantised = replace(
        weights.gate_up,
        data=weights.gate_up.data.to(torch.float8_e4m3fn),
        layout="fp8-block",
        scale=scale,
        block=(128, 128),
    )
    weights = replace(weights, gate_up=quantised)
    hidden, (index, weight) = torch.randn(5, 128).bfloat16(), routing(5, 1, 2)
    out = GroupedExperts().forward(weights, hidden, index, weight)
    assert torch.equal(out, REFERENCE.forward(weights, hidden, index, weight))
