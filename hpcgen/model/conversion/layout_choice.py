"""Which layout each weight is stored in: the named choices that `convert` offers."""

from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from hpcgen.kernels.layouts import PANELS, PANELS_TRANSPOSED, choose_layout
from hpcgen.model.conversion.definition import Definition
from hpcgen.model.errors import ModelError
from hpcgen.model.experts import is_experts_module

LayoutOf = Callable[[str, tuple[int, ...], torch.dtype], str]
"""(name, shape, dtype) of a weight that is not quantised -> the layout to store it in."""


def layout_choice(layout: str, definition: Definition) -> LayoutOf:
    """The choice called `layout`, for a model. Raises ModelError for an unknown one."""
    if layout not in _CHOICES:
        raise ModelError(f"There is no weight layout '{layout}': choose one of {', '.join(_CHOICES)}.")
    return _CHOICES[layout](definition)


def layout_version(layout: str) -> list[str]:
    """What a file in this layout depends on: the packings' names, which change when what they mean does."""
    return [layout, PANELS, PANELS_TRANSPOSED, "tied embeddings too"] if layout == "packed" else [layout]


def _plain(definition: Definition) -> LayoutOf:
    """Every weight as transformers has it: for CUDA, and for any kernel."""
    return lambda name, shape, dtype: "plain"


def _packed(definition: Definition) -> LayoutOf:
    """Linears and experts as the CPU kernels compute fastest with; the rest, and what does not divide, plain."""
    modules = dict(definition.model.named_modules())
    # A head that is the embedding has its products in every step; what the embedding reads of it is little.
    heads = {
        owner for alias, owner in definition.aliases.items() if type(modules[alias.rpartition(".")[0]]) is nn.Linear
    }

    def layout_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        path, _, leaf = name.rpartition(".")
        module = modules[path]
        if is_experts_module(module) and len(shape) == 3:
            return choose_layout("experts-transposed" if module.is_transposed else "experts", shape, dtype)
        # Absorbed MLA multiplies by parts of kv_b_proj, not by the whole.
        is_linear = type(module) is nn.Linear and leaf == "weight" and not path.endswith(".kv_b_proj")
        if is_linear or (type(module) is nn.Embedding and name in heads):
            return choose_layout("linear", shape, dtype)
        return "plain"

    return layout_of


_CHOICES: Final = {"plain": _plain, "packed": _packed}
