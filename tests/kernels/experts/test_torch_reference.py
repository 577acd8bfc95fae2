import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hpcgen.kernels.experts.interface import ExpertWeights
from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.kernels.layouts import StoredTensor
from tests.kernels.experts.layers import experts, packed, routing


def weights_of(module, activation, gpt_oss) -> ExpertWeights:
    def stored(parameter):
        return StoredTensor(parameter.data, tuple(parameter.shape))

    return ExpertWeights(
        gate_up=stored(module.gate_up_proj),
        down=stored(module.down_proj),
        gate_up_bias=module.gate_up_proj_bias.data if gpt_oss else None,
        down_bias=module.down_proj_bias.data if gpt_oss else None,
        transposed=gpt_oss,
        interleaved=gpt_oss,
        activation=activation,
    )


@pytest.mark.parametrize("gpt_oss", [False, True])
def test_equals_the_modules_of_transformers(gpt_oss):
    if gpt_oss:
        config = GptOssConfig(hidden_size=32, intermediate_size=48, num_local_experts=6, num_experts_per_tok=2)
        module = GptOssExperts(config)
    else:
        config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2)
        module = Qwen3MoeExperts(config)
    config._experts_implementation = "eager"
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden, (index, weight) = torch.randn(20, 32), routing(20, 2, 6)
    weights = weights_of(module, "swiglu_oai" if gpt_oss else "silu", gpt_oss)
    with torch.no_grad():
        expected = module(hidden, index, weight)
    torch.testing.assert_close(TorchExperts().forward(weights, hidden, index, weight), expected)


def test_packed_weights_give_the_same_bits_as_plain_ones():
    weights = experts(5, 64, 32, "swiglu_oai", bias=True)
    hidden, (index, weight) = torch.randn(9, 64).bfloat16(), routing(9, 3, 5)
    plain = TorchExperts().forward(weights, hidden, index, weight)
    assert torch.equal(TorchExperts().forward(packed(weights), hidden, index, weight), plain)
