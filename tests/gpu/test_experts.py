from dataclasses import replace

import pytest
import torch

from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.kernels.select import select_experts
from tests.kernels.experts.layers import experts, in_fp32, routing

pytestmark = pytest.mark.gpu


def on_device(weights, device):
    return replace(
        weights,
        gate_up=replace(weights.gate_up, data=weights.gate_up.data.to(device)),
        down=replace(weights.down, data=weights.down.data.to(device)),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias.to(device),
        down_bias=None if weights.down_bias is None else weights.down_bias.to(device),
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_experts_equal_those_of_the_cpu(cuda, activation, tokens):
    weights = experts(16, 128, 64, activation, bias=activation == "swiglu_oai")
    hidden, (index, weight) = torch.randn(tokens, 128).bfloat16(), routing(tokens, 4, 16)
    expected = TorchExperts().forward(in_fp32(weights), hidden.float(), index, weight)
    backend = select_experts(cuda, torch.bfloat16)
    out = backend.forward(on_device(weights, cuda), hidden.to(cuda), index.to(cuda), weight.to(cuda)).float().cpu()
    assert (out - expected).abs().max() <= 1.5e-2 * expected.abs().max()


def test_experts_of_other_ranks_add_nothing(cuda):
    weights = experts(4, 128, 64, first=3)
    hidden, (index, weight) = torch.randn(64, 128).bfloat16(), routing(64, 3, 10)
    expected = TorchExperts().forward(in_fp32(weights), hidden.float(), index, weight)
    backend = select_experts(cuda, torch.bfloat16)
    out = backend.forward(on_device(weights, cuda), hidden.to(cuda), index.to(cuda), weight.to(cuda)).float().cpu()
    assert (out - expected).abs().max() <= 1.5e-2 * expected.abs().max()
