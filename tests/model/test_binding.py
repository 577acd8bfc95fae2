"""Weights that come and go: bound in place, in another place, packed, missing, or taken away."""

import pytest
import torch

from hpcgen.kernels.layouts import PANELS, StoredTensor, pack
from hpcgen.model.errors import ModelError

from .paged import PagedRunner, bound_model, stored, stored_weights
from .tiny_models import TINY, build_tiny

TOKENS = torch.tensor([3, 4, 5, 6])


def run(model) -> torch.Tensor:
    with torch.inference_mode():
        return PagedRunner(model, 1).run({0: TOKENS})[0]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_forward_over_an_unbound_unit_fails(name):
    reference = build_tiny(name, torch.float32)
    model = bound_model(reference, TINY[name][0], torch.float32)
    for unit in model.units:
        model.unbind(unit)
        with pytest.raises((AttributeError, RuntimeError)):
            run(model)
        model.bind(unit, stored_weights(reference))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_every_stage_of_an_unbound_layer_fails_by_itself(name):
    model = bound_model(build_tiny(name, torch.float32), TINY[name][0], torch.float32)
    model.unbind("layer.1")
    hidden = torch.randn(1, 2, 64)
    with pytest.raises((AttributeError, RuntimeError)):
        model.experts_stage(1)(hidden)
    with pytest.raises(AttributeError):
        model.attention_stage(1)(hidden, position_embeddings=None, attention_mask=None, forward_context=None)


def test_a_prepared_unit_reads_the_memory_it_was_prepared_for():
    first, second = build_tiny("llama", torch.float32, seed=1), build_tiny("llama", torch.float32, seed=2)
    model = bound_model(first, "llama", torch.float32)
    expected = run(model)
    here, there = (model.prepare("layer.1", stored_weights(reference)) for reference in (first, second))
    there.apply()
    assert not torch.equal(run(model), expected)
    here.apply()
    assert torch.equal(run(model), expected)


def test_bound_weights_are_not_copied():
    reference = build_tiny("qwen3_moe", torch.float32)
    model = bound_model(reference, "qwen3_moe", torch.float32)
    weights = reference.state_dict()
    assert model.experts[1].weights.down.data.data_ptr() == weights["model.layers.1.mlp.experts.down_proj"].data_ptr()
    projection = model.attention_stage(1).q_proj
    assert projection.weight.data_ptr() == weights["model.layers.1.self_attn.q_proj.weight"].data_ptr()


def test_a_tied_head_computes_with_the_embedding():
    reference = build_tiny("llama_tied", torch.float32)
    model = bound_model(reference, "llama", torch.float32)
    assert "head" not in model.units
    model.unbind("embedding")
    assert not hasattr(model.module.lm_head, "weight")
    model.bind("embedding", stored_weights(reference))
    assert model.module.lm_head.weight is not None


def test_a_packed_embedding_gives_the_rows_of_the_plain_one():
    reference = build_tiny("llama_tied", torch.bfloat16)
    model = bound_model(reference, "llama", torch.bfloat16)
    ids, weights = torch.tensor([0, 31, 32, 255, 5]), stored_weights(reference)
    expected = model.embed(ids)
    packed = pack(weights["model.embed_tokens.weight"].data, PANELS)
    model.bind("embedding", {**weights, "model.embed_tokens.weight": packed})
    assert torch.equal(model.embed(ids), expected)
    model.unbind("embedding")
    with pytest.raises(AttributeError):
        model.embed(ids)


def test_a_unit_may_hold_a_run_of_the_experts():
    reference = build_tiny("qwen3_moe", torch.float32)
    model = bound_model(reference, "qwen3_moe", torch.float32)
    weights = stored_weights(reference)
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{part}"
        weights[name] = stored(weights[name].data[2:5])
    model.bind("layer.0", weights, first_expert=2)
    assert (model.experts[0].weights.first, model.experts[0].weights.count) == (2, 3)


def test_a_missing_weight_is_named():
    model = bound_model(build_tiny("llama", torch.float32), "llama", torch.float32)
    with pytest.raises(ModelError, match=r"'model.layers.0.\S+' is missing"):
        model.prepare("layer.0", {})


def test_a_weight_of_another_shape_is_refused():
    reference = build_tiny("llama", torch.float32)
    model = bound_model(reference, "llama", torch.float32)
    weights = stored_weights(reference)
    weights["model.norm.weight"] = stored(torch.ones(32))
    with pytest.raises(ModelError, match=r"shape \[32\], but the configuration asks for \[64\]"):
        model.prepare("final_norm", weights)


def test_a_quantised_norm_is_refused():
    reference = build_tiny("llama", torch.float32)
    model = bound_model(reference, "llama", torch.float32)
    weights = stored_weights(reference)
    weights["model.norm.weight"] = StoredTensor(torch.zeros(64, dtype=torch.uint8), (64,), "mxfp4")
    with pytest.raises(ModelError, match="needs a plain one"):
        model.prepare("final_norm", weights)


def test_a_layer_can_change_between_packed_and_plain_weights():
    reference = build_tiny("llama", torch.bfloat16)
    model = bound_model(reference, "llama", torch.bfloat16)
    expected = run(model)
    weights = stored_weights(reference)
    packed = {
        name: pack(weight.data, "panels32") if name.endswith("_proj.weight") else weight
        for name, weight in weights.items()
    }
    model.bind("layer.0", packed)
    torch.testing.assert_close(run(model), expected, atol=0.1, rtol=0)
    assert model.attention_stage(0).q_proj.weight is None
    model.bind("layer.0", weights)
    assert torch.equal(run(model), expected)
