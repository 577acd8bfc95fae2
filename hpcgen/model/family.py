"""Model families: where a transformers definition has its embedding, layers, yield points and head.

`configs/models/<model_type>.yaml` describes the families that a parity test covers. Any other causal LM is described
by looking at its modules.
"""

import dataclasses
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hpcgen.model.errors import ModelError

EXPERT_STAGE_NAMES = ("mlp", "block_sparse_moe", "feed_forward", "moe", "ffn")


@dataclass(frozen=True, slots=True)
class Family:
    """Module paths of one model family. Paths are those of `nn.Module.get_submodule`."""

    name: str
    layers: str
    """The list of decoder layers, from the model."""
    embedding: str
    final_norm: str
    head: str
    attention: str
    """The attention stage of a layer, from the layer."""
    experts: str
    """The MoE stage of a layer (its MLP where the layer is dense), from the layer: the yield point."""
    transformers_model_type: str | None = None
    """The model type whose definition transformers has, where the checkpoint names another one (Kimi-K2)."""
    tensor_parallel: dict[str, str] = dataclasses.field(default_factory=dict)
    """Entries that the definition's own tensor-parallel plan lacks: module or parameter path to style."""
    measured: bool = False
    """A parity test against transformers covers this family."""

    def layer(self, model: PreTrainedModel, index: int) -> nn.Module:
        return model.get_submodule(f"{self.layers}.{index}")


def described(model_type: str) -> dict[str, Any] | None:
    """What `configs/models` says of a model type; None if it says nothing."""
    file = resources.files("hpcgen").joinpath("configs", "models", f"{model_type}.yaml")
    if not file.is_file():
        return None
    return yaml.safe_load(file.read_text())


def family_of(model_type: str, model: PreTrainedModel) -> Family:
    """The family of a model, from its description or else from its modules.

    Raises ModelError where there is no description and the modules are not those of a decoder of uniform layers.
    """
    description = described(model_type)
    if description is not None:
        return Family(name=model_type, measured=True, **description)
    return _look_at(model_type, model)


def _look_at(model_type: str, model: PreTrainedModel) -> Family:
    paths = {id(module): path for path, module in model.named_modules()}
    count = layer_count(model.config)
    lists = [path for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ModelError(
            f"Model type '{model_type}' has no list of {count} decoder layers: it cannot be run by layers."
        )
    layers = min(lists, key=lambda path: path.count("."))
    decoder_layers = [model.get_submodule(f"{layers}.{index}") for index in range(count)]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None:
        raise ModelError(f"Model type '{model_type}' has no token embedding or no language-model head.")
    return Family(
        name=model_type,
        layers=layers,
        embedding=paths[id(embedding)],
        final_norm=_final_norm(model_type, model, layers),
        head=paths[id(head)],
        attention=_child_of_all(model_type, decoder_layers, ("self_attn", "attention", "attn", "self_attention")),
        experts=_child_of_all(model_type, decoder_layers, EXPERT_STAGE_NAMES),
    )


def layer_count(config: PreTrainedConfig) -> int:
    return config.get_text_config().num_hidden_layers


def _child_of_all(model_type: str, layers: list[nn.Module], names: tuple[str, ...]) -> str:
    for name in names:
        if all(isinstance(getattr(layer, name, None), nn.Module) for layer in layers):
            return name
    raise ModelError(
        f"Model type '{model_type}': its decoder layers have none of the modules {', '.join(names)} in common, "
        "so there is no point to yield at."
    )


def _final_norm(model_type: str, model: PreTrainedModel, layers: str) -> str:
    decoder = Path(layers.replace(".", "/")).parent.as_posix().replace("/", ".")
    for name, _ in model.get_submodule(decoder).named_children():
        if "norm" in name.lower() or name == "ln_f":
            return f"{decoder}.{name}"
    raise ModelError(f"Model type '{model_type}' has no norm after its decoder layers.")
