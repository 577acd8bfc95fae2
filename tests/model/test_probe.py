"""The probe: what it finds in a definition, and definitions that misuse KV or attention."""

import pytest
import torch

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.model.attention_function import paged_attention
from hpcgen.model.causal import CausalModel
from hpcgen.model.errors import ModelError
from hpcgen.model.forward_context import ForwardContext
from hpcgen.model.probe import ProbeAttention, kv_layout_found, probe_batch

from .tiny_models import TINY, build_tiny, tiny_config

K, V = (4, 8), (4, 8)


def probed(asked: list[int], written: list, windows: list) -> ProbeAttention:
    return ProbeAttention(asked=asked, written=written, windows=windows)


def test_the_layout_is_that_of_the_keys_and_values_written():
    model = build_tiny("llama", torch.float32)
    found = kv_layout_found(model, probed([0, 0, 1, 1, 2, 2], [(K, V)] * 3, [None] * 3), 3, torch.bfloat16)
    assert found == KVLayout(3, 4, 8, 4, 8, torch.bfloat16)


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (probed([], [], []), "writes keys and values once"),
        (probed([0, 0, 1, 1], [(K, V)] * 2, [None] * 2), "writes keys and values once"),
        (probed([0, 0, 1, 1, 1, 1], [(K, V)] * 3, [None] * 3), "writes keys and values once"),
        (probed([0, 0, 1, 1, 2, 2], [(K, V), (K, V), (K, (4, 4))], [None] * 3), "different shapes"),
        (probed([0, 0, 1, 1, 2, 2], [(K, V)] * 3, [None, 8, None]), "window of layer 1"),
    ],
)
def test_what_pages_cannot_hold_is_refused(probe, reason):
    with pytest.raises(ModelError, match=reason):
        kv_layout_found(build_tiny("llama", torch.float32), probe, 3, torch.float32)


def test_windows_have_to_reach_the_layers_that_have_them():
    model = build_tiny("gpt_oss", torch.float32)
    assert model.config.layer_types == ["sliding_attention", "full_attention"] * 2
    asked = [layer for layer in range(4) for _ in range(2)]
    kv_layout_found(model, probed(asked, [(K, V)] * 4, [8, None, 8, None]), 4, torch.float32)
    with pytest.raises(ModelError, match="window of layer 0, 8"):
        kv_layout_found(model, probed(asked, [(K, V)] * 4, [None] * 4), 4, torch.float32)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"attention_mask": torch.zeros(1)}, "mask or bias of its own"),
        ({"softcap": 30.0}, "softcap"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "not causal"),
        ({"forward_context": None}, "do not pass arguments on"),
    ],
)
def test_attention_that_asks_for_more_is_refused(arguments, reason):
    module = torch.nn.Module()
    module.layer_idx = 0
    probe = ProbeAttention()
    context = ForwardContext(probe_batch(2), probe, probe.kv)
    query = torch.empty(1, 4, 2, 8, device="meta")
    with pytest.raises(ModelError, match=reason):
        paged_attention(
            module, query, query, query, **{"attention_mask": None, "forward_context": context, **arguments}
        )


@pytest.mark.parametrize("name", TINY)
def test_probing_leaves_nothing_bound(name):
    model = CausalModel.from_config(TINY[name][0], tiny_config(name), torch.float32, torch.device("cpu"))
    assert not list(model.module.parameters())
    assert all(layer.weights is None for layer in model.experts.values())
    assert not hasattr(model, "experts_backend")
