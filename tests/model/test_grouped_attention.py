"""Attention with joined projections and one pass for norm, rotation and KV, against the definition's own forward."""

import pytest
import torch

from hpcgen.kernels.attention.native import NativeAttention
from hpcgen.kernels.layouts import PANELS, pack
from hpcgen.model.grouped_attention import GroupedAttention
from tests.kernels.libraries import every_isa, library_or_skip

from .paged import PagedRunner, bound_model, stored_weights
from .tiny_models import TINY, VOCABULARY, build_tiny, tiny_with


def logits(model, library) -> torch.Tensor:
    """Of two sequences that grow in chunks and single tokens."""
    runner = PagedRunner(model, 2)
    runner.attention = NativeAttention(library)
    tokens = torch.arange(3, 90) % VOCABULARY
    parts = [{0: tokens[:70], 1: tokens[:5]}, {0: tokens[70:71], 1: tokens[5:6]}, {0: tokens[71:80], 1: tokens[6:7]}]
    with torch.inference_mode():
        return torch.cat([torch.cat(runner.run(part)) for part in parts]).float()


@every_isa
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral_sliding"])
def test_it_computes_what_the_definition_computes(monkeypatch, isa, name):
    library = library_or_skip(isa)
    reference = tiny_with(name, torch.bfloat16, head_dim=32)
    model = bound_model(reference, TINY[name][0], torch.bfloat16)
    own = logits(model, library)
    weights = {
        key: pack(weight.data, PANELS) if ".self_attn." in key and key.endswith("_proj.weight") else weight
        for key, weight in stored_weights(reference).items()
    }
    for unit in model.units:
        model.bind(unit, weights)
    joined = []
    rotated = GroupedAttention._rotated
    monkeypatch.setattr(GroupedAttention, "_rotated", lambda *args: joined.append(1) or rotated(*args))
    found = logits(model, library)
    assert len(joined) == 3 * model.layers
    # bf16 logits of about 5: the definition rounds after every product, and a flipped expert differs by more.
    assert (found - own).abs().median() < 0.03
    if "mo" not in name and "mix" not in name:
        torch.testing.assert_close(found, own, atol=0.25, rtol=0)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_attention_of_another_kind_keeps_its_forward(name):
    model = bound_model(build_tiny(name, torch.bfloat16), TINY[name][0], torch.bfloat16)
    assert not isinstance(model.attention_stage(0).forward, GroupedAttention)


def test_plain_weights_and_heads_that_do_not_divide_run_the_own_forward(monkeypatch):
    library = library_or_skip("avx2")
    monkeypatch.setattr(GroupedAttention, "_rotated", lambda *args: pytest.fail("joined"))
    plain = tiny_with("llama", torch.bfloat16, head_dim=32)
    logits(bound_model(plain, "llama", torch.bfloat16), library)
    narrow = build_tiny("llama", torch.bfloat16)
    model = bound_model(narrow, "llama", torch.bfloat16)
    weights = {k: pack(w.data, PANELS) if "_proj." in k else w for k, w in stored_weights(narrow).items()}
    for index in range(model.layers):
        model.bind(f"layer.{index}", weights)
    logits(model, library)
