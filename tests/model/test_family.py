"""Where each family has its stages, by description and by looking at the modules."""

from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hpcgen.model.architecture import definition_of
from hpcgen.model.errors import ModelError
from hpcgen.model.family import Family, described, family_of

from .tiny_models import TINY, tiny_config

DESCRIBED = sorted({model_type for model_type, _ in TINY.values()})
REPOSITORY = Path(__file__).parents[2]


def meta_model(name: str) -> nn.Module:
    config = tiny_config(name)
    with torch.device("meta"):
        return definition_of(config.model_type, config)(config)


def test_every_described_family_is_tested_and_every_tested_one_is_described():
    files = resources.files("hpcgen").joinpath("configs", "models").iterdir()
    assert sorted(file.name.removesuffix(".yaml") for file in files) == DESCRIBED


def test_descriptions_of_the_package_are_those_of_the_repository():
    for model_type in DESCRIBED:
        in_package = resources.files("hpcgen").joinpath("configs", "models", f"{model_type}.yaml")
        assert in_package.read_text() == (REPOSITORY / "configs" / "models" / f"{model_type}.yaml").read_text()


def test_a_family_without_a_description_has_none():
    assert described("olmo2") is None


@pytest.mark.parametrize("name", TINY)
def test_modules_are_where_the_description_says(name):
    model = meta_model(name)
    family = family_of(TINY[name][0], model)
    assert family.measured
    assert model.get_submodule(family.embedding) is model.get_input_embeddings()
    assert model.get_submodule(family.head) is model.get_output_embeddings()
    for index in range(model.config.num_hidden_layers):
        layer = family.layer(model, index)
        assert layer.get_submodule(family.attention).layer_idx == index
        assert layer.get_submodule(family.experts) is not None


@pytest.mark.parametrize("name", TINY)
def test_looking_at_the_modules_finds_what_the_description_says(name):
    model = meta_model(name)
    found = family_of("not described", model)
    told = family_of(TINY[name][0], model)
    paths = ("layers", "embedding", "final_norm", "head", "attention", "experts")
    assert [getattr(found, path) for path in paths] == [getattr(told, path) for path in paths]
    assert not found.measured


def test_a_model_without_uniform_layers_is_refused():
    model = meta_model("llama")
    model.model.layers[1].mlp = None
    with pytest.raises(ModelError, match="no point to yield at"):
        family_of("not described", model)


def test_a_model_without_a_head_is_refused():
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.lm_head = None
    with pytest.raises(ModelError, match="no language-model head"):
        family_of("not described", model)


def test_a_family_is_made_of_paths():
    family = Family("x", "model.layers", "model.embed_tokens", "model.norm", "lm_head", "self_attn", "mlp")
    model = meta_model("llama")
    assert family.layer(model, 2) is model.model.layers[2]
