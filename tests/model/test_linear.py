"""Linears, MLPs and experts over packed and quantised weights give what the same weights give as plain ones."""

import copy

import pytest
import torch

from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.layouts import PANELS, PANELS_TRANSPOSED, StoredTensor, pack
from hpcgen.model.linear import StoredGatedMLP, dense_weight

from .paged import PagedRunner, bound_model, stored_weights
from .tiny_models import TINY, VOCABULARY, build_tiny


def run(model) -> torch.Tensor:
    tokens = torch.arange(3, 40) % VOCABULARY
    with torch.inference_mode():
        return PagedRunner(model, 1).run({0: tokens})[0].float()


def is_linear_weight(name: str) -> bool:
    return name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))


def quantised(weight: torch.Tensor, block: int = 32) -> StoredTensor:
    """fp8 by blocks, as DeepSeek-V3's checkpoints have it."""
    rows, columns = (-(-size // block) for size in weight.shape[-2:])
    scale = torch.rand(*weight.shape[:-2], rows, columns) + 0.5
    return StoredTensor(weight.to(torch.float8_e4m3fn), tuple(weight.shape), "fp8-block", scale, (block, block))


@pytest.mark.parametrize("name", ["llama", "qwen2", "deepseek_v2_lite", "deepseek_v3"])
def test_a_model_of_fp8_weights_is_the_model_of_the_decoded_ones(name):
    reference = build_tiny(name, torch.float32)
    weights = {
        key: quantised(weight.data) if is_linear_weight(key) or ".experts." in key else weight
        for key, weight in stored_weights(reference).items()
    }
    decoded = copy.deepcopy(reference)
    decoded.load_state_dict(
        {
            key: dequantize(weight, weight.data.dtype if weight.layout == "plain" else torch.float32)
            for key, weight in weights.items()
        }
    )
    expected = run(bound_model(decoded, TINY[name][0], torch.float32))
    model = bound_model(reference, TINY[name][0], torch.float32)
    for unit in model.units:
        model.bind(unit, weights)
    torch.testing.assert_close(run(model), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_model_of_packed_weights_differs_from_the_plain_one_by_roundings(name):
    """The packed kernels round intermediates once where torch rounds them after every product, so bf16 logits of about
    5 differ a little; a flipped expert differs by more, hence the median."""
    reference = build_tiny(name, torch.bfloat16)
    model = bound_model(reference, TINY[name][0], torch.bfloat16)
    plain = run(model)
    weights = stored_weights(reference)
    for key, weight in weights.items():
        if is_linear_weight(key) and all(size % 32 == 0 for size in weight.shape):
            weights[key] = pack(weight.data, PANELS)
        elif ".experts." in key and len(weight.shape) == 3:
            weights[key] = pack(weight.data, PANELS_TRANSPOSED if name == "gpt_oss" else PANELS)
    for unit in model.units:
        model.bind(unit, weights)
    assert (run(model) - plain).abs().median() < 0.03


def test_a_packed_mlp_runs_as_one_kernel(monkeypatch):
    reference = build_tiny("llama", torch.bfloat16)
    model = bound_model(reference, "llama", torch.bfloat16)
    forward = model.experts_stage(0).forward
    assert isinstance(forward, StoredGatedMLP)
    calls = []
    monkeypatch.setattr("hpcgen.model.linear.gated_mlp", lambda x, gate, up, down, activation: calls.append(activation))
    weights = stored_weights(reference)
    model.bind("layer.0", {k: pack(w.data, PANELS) if ".mlp." in k else w for k, w in weights.items()})
    forward(torch.zeros(1, 2, 64, dtype=torch.bfloat16))
    model.bind("layer.0", weights)
    forward(torch.zeros(1, 2, 64, dtype=torch.bfloat16))
    assert calls == ["silu"]


def test_the_dense_weight_of_a_linear_is_what_is_bound():
    reference = build_tiny("llama", torch.bfloat16)
    model = bound_model(reference, "llama", torch.bfloat16)
    projection, weights = model.attention_stage(0).q_proj, stored_weights(reference)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(dense_weight(projection, torch.bfloat16), weights[name].data)
    model.bind("layer.0", {**weights, name: pack(weights[name].data, PANELS)})
    assert torch.equal(dense_weight(projection, torch.bfloat16), weights[name].data)
