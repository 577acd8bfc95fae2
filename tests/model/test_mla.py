"""Absorbed latent attention: which modules it replaces, what it keeps in pages, and that it follows its weights."""

import pytest
import torch

from hpcgen.model.mla import AbsorbedAttention, absorb

from .paged import PagedRunner, bound_model, stored_weights
from .tiny_models import TINY, build_tiny

LATENT = ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "kimi_k2"]


@pytest.mark.parametrize("name", LATENT)
def test_pages_hold_the_latent_and_the_rotary_key_alone(name):
    model = bound_model(build_tiny(name, torch.float32), TINY[name][0], torch.float32)
    layout = model.kv_layout
    assert model.latent_attention
    assert (layout.first_heads, layout.first_dim, layout.second_heads, layout.second_dim) == (1, 24, 1, 8)
    assert all(isinstance(model.attention_stage(i).forward, AbsorbedAttention) for i in range(model.layers))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_other_attention_keeps_its_forward(name):
    model = build_tiny(name, torch.float32)
    assert not absorb(model.model.layers[0].self_attn)
    assert "forward" not in model.model.layers[0].self_attn.__dict__


def test_both_rotary_conventions_of_deepseek_v3_have_parity():
    reference = build_tiny("deepseek_v3", torch.float32)
    tokens = torch.arange(3, 30)
    logits = []
    for interleave in (True, False):
        reference.config.rope_interleave = interleave
        model = bound_model(reference, "deepseek_v3", torch.float32)
        with torch.inference_mode():
            logits.append(PagedRunner(model, 1).run({0: tokens})[0])
            expected = reference(tokens[None], use_cache=False).logits[0]
        torch.testing.assert_close(logits[-1], expected, atol=2e-5, rtol=0)
    assert not torch.allclose(*logits)


def test_the_up_projections_are_taken_again_at_each_call():
    first, second = build_tiny("deepseek_v3", torch.float32, seed=1), build_tiny("deepseek_v3", torch.float32, seed=2)
    model = bound_model(first, "deepseek_v3", torch.float32)
    tokens = torch.arange(3, 30)
    for reference in (second, first):
        for unit in model.units:
            model.bind(unit, stored_weights(reference))
        with torch.inference_mode():
            found = PagedRunner(model, 1).run({0: tokens})[0]
            expected = reference(tokens[None], use_cache=False).logits[0]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
