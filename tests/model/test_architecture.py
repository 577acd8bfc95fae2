"""What a model directory's config.json makes of it: a definition, or one clear message."""

import json
from pathlib import Path

import pytest
import torch

from hpcgen.model.architecture import definition_of, read_config
from hpcgen.model.causal import CausalModel
from hpcgen.model.errors import ModelError

from .tiny_models import TINY, save_tiny, tiny_config


def directory_with(tmp_path: Path, content: str) -> Path:
    (tmp_path / "config.json").write_text(content)
    return tmp_path


@pytest.mark.parametrize("name", TINY)
def test_a_saved_model_directory_is_built(name, tmp_path):
    save_tiny(name, tmp_path, torch.bfloat16)
    model = CausalModel.build(tmp_path, torch.bfloat16, torch.device("cpu"))
    assert model.family.name == TINY[name][0]
    assert model.family.measured
    assert model.layers == tiny_config(name).num_hidden_layers
    assert not list(model.module.parameters())
    assert all(buffer.device.type == "cpu" for buffer in model.module.buffers())


def test_kimi_k2_has_the_definition_of_deepseek_v3(tmp_path):
    save_tiny("kimi_k2", tmp_path, torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "kimi_k2"
    model_type, config = read_config(tmp_path)
    assert (model_type, definition_of(model_type, config).__name__) == ("kimi_k2", "DeepseekV3ForCausalLM")


def test_a_directory_without_a_config_is_no_model_directory(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not an object"),
        ("{}", "names no model_type"),
        ('{"model_type": "quux"}', "'quux' is not one that transformers knows"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "not a valid configuration of 'llama'"),
    ],
)
def test_a_bad_config_gives_one_message(content, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        read_config(directory_with(tmp_path, content))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_frequencies_that_depend_on_the_batch_are_refused(rope_type):
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ModelError, match="longest sequence"):
        definition_of("llama", config)


def test_old_names_of_rotary_options_are_read(tmp_path):
    content = tiny_config("llama").to_dict()
    del content["rope_parameters"]
    content |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    _, config = read_config(directory_with(tmp_path, json.dumps(content)))
    assert (config.rope_parameters["rope_theta"], config.rope_parameters["rope_type"]) == (5e5, "linear")


def test_a_config_that_asks_for_router_logits_or_quantisation_runs(tmp_path):
    save_tiny("qwen3_moe", tmp_path, torch.float32)
    content = json.loads((tmp_path / "config.json").read_text())
    content |= {"output_router_logits": True, "output_hidden_states": True}
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = CausalModel.build(directory_with(tmp_path, json.dumps(content)), torch.float32, torch.device("cpu"))
    assert not model.config.output_router_logits
