"""Units partition the state dict, in the order of a forward."""

import pytest
import torch

from hpcgen.model.causal import CausalModel
from hpcgen.model.units import EMBEDDING, FINAL_NORM, HEAD, layer_unit, owned_names

from .tiny_models import TINY, build_tiny, tiny_config


def built(name: str) -> CausalModel:
    return CausalModel.from_config(TINY[name][0], tiny_config(name), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", TINY)
def test_every_tensor_is_in_one_unit(name):
    names = [parameter for parameters in built(name).units.values() for parameter in parameters]
    assert sorted(names) == sorted(owned_names(build_tiny(name, torch.float32)))
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_units_are_in_the_order_of_a_forward(name):
    model = built(name)
    assert list(model.units) == [EMBEDDING, *map(layer_unit, range(model.layers)), FINAL_NORM, HEAD]
    assert model.units[EMBEDDING] == ["model.embed_tokens.weight"]
    assert model.units[FINAL_NORM] == ["model.norm.weight"]
    assert model.units[HEAD] == ["lm_head.weight"]


def test_a_tied_head_has_no_unit():
    assert HEAD not in built("llama_tied").units


def test_correction_biases_of_routers_belong_to_their_layer():
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in built("deepseek_v3").units[layer_unit(1)]
