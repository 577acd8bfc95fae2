"""From a model directory to the transformers definition that runs it, or to the reason why none does."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hpcgen.model.errors import ModelError
from hpcgen.model.family import described

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Attention that paged KV serves: causal over all keys, or over a window of them."""
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rotary frequencies that depend on the longest sequence of a batch: results would depend on what runs together."""


def read_config(directory: Path) -> tuple[str, PreTrainedConfig]:
    """The model type that `directory/config.json` names, and its configuration.

    Raises ModelError: no such directory or file, not JSON, no model type, or one that transformers does not know.
    """
    file = directory / "config.json"
    if not directory.is_dir():
        raise ModelError(f"There is no model directory {directory}. Give --model a local directory of a model.")
    if not file.is_file():
        raise ModelError(f"{directory} is not a model directory: it has no config.json. Give --model a directory.")
    try:
        content: Any = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} cannot be read: its JSON is not an object.")
    model_type = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(model_type, str):
        raise ModelError(f"{file} names no model_type: it is not the configuration of a transformers model.")
    known_as = (described(model_type) or {}).get("transformers_model_type", model_type)
    content.pop("auto_map", None)
    if known_as not in CONFIG_MAPPING:
        raise ModelError(f"{file}: model type '{model_type}' is not one that transformers knows.")
    try:
        config = CONFIG_MAPPING[known_as].from_dict({**content, "model_type": known_as})
    except Exception as error:
        raise ModelError(f"{file} is not a valid configuration of '{model_type}': {error}") from error
    return model_type, config


def context_length(config: PreTrainedConfig) -> int:
    """Most tokens of a sequence that the model's positions are made for. Raises ModelError where it names no number."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ModelError(
            f"Model type '{config.model_type}' does not say how long its context is; give --max-model-len."
        )
    return length


def definition_of(model_type: str, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The ForCausalLM class. Raises ModelError for an architecture that cannot be served with paged KV."""
    refuse = _refusal(config)
    if refuse is not None:
        raise ModelError(f"Model type '{model_type}' is not supported: {refuse}.")
    definition = AutoModelForCausalLM._model_mapping[type(config)]
    assert isinstance(definition, type)
    return definition


def _refusal(config: PreTrainedConfig) -> str | None:
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return "transformers has no causal language model for it"
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if config.get_text_config() is not config:
        return "it is multimodal; only text-only causal language models are run"
    text = config.to_dict()
    unsupported = sorted({str(kind) for kind in text.get("layer_types") or []} - LAYER_TYPES)
    if unsupported:
        return f"it has layers of type {', '.join(unsupported)}, which keep another state than paged keys and values"
    for rope_type in _rope_types(text.get("rope_parameters")) & BATCH_DEPENDENT_ROPE:
        return f"its rotary embedding ('{rope_type}') depends on the longest sequence in a batch"
    if text.get("alibi"):
        return "it uses ALiBi position biases"
    return None


def _rope_types(parameters: Any) -> set[str]:
    """Kinds of rotary embedding in `rope_parameters`, which may be one for all layers or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    types = {str(parameters[key]) for key in ("rope_type", "type") if parameters.get(key)}
    return types.union(*(_rope_types(value) for value in parameters.values()))
