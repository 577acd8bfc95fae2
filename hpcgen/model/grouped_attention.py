"""Grouped-query attention in fewer passes: one product for query, key and value, then norm, rotation and KV at once.

The attention modules of Llama, Qwen2, Qwen3, Qwen3-MoE, Mistral and Mixtral, and textual copies of them, get a
`forward` that does so where the kernels take the weights as they are bound; else their own runs.

T tokens, D hidden, H query heads, G KV heads, W head dimension.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from hpcgen.kernels.attention.interface import RotaryInputs, RotaryWriter
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.kernels.linear import linears
from hpcgen.model.attention_function import refuse_unknown
from hpcgen.model.forward_context import ForwardContext
from hpcgen.model.linear import STORED_WEIGHT

Window = Callable[[nn.Module], int | None]
_WINDOWS: dict[str, Window] = {
    inspect.getsource(modeling_llama.LlamaAttention.forward): lambda attention: None,
    inspect.getsource(modeling_qwen2.Qwen2Attention.forward): lambda attention: attention.sliding_window,  # type: ignore
    inspect.getsource(modeling_qwen3.Qwen3Attention.forward): lambda attention: attention.sliding_window,  # type: ignore
    inspect.getsource(modeling_mixtral.MixtralAttention.forward): lambda attention: getattr(
        attention.config, "sliding_window", None
    ),
}
"""Source of a `forward` that can be replaced -> the sliding window that it asks for."""
_ROTARY_PARTS = ("rotate_half", "apply_rotary_pos_emb")
_ROTARY = [inspect.getsource(getattr(modeling_llama, name)) for name in _ROTARY_PARTS]


class GroupedAttention:
    """The `forward` of a grouped-query attention module."""

    def __init__(self, attention: nn.Module, window: Window) -> None:
        self.attention: Any = attention
        self.own_forward = attention.forward
        self.window = window
        self.norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        *,
        forward_context: ForwardContext | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, D] -> [1, T, D]."""
        a, context = self.attention, forward_context
        projections = (a.q_proj, a.k_proj, a.v_proj)
        weights = [projection.__dict__[STORED_WEIGHT] for projection in projections]
        if context is None or not self._takes(hidden_states, weights, context):
            return self.own_forward(
                hidden_states, position_embeddings, attention_mask, forward_context=forward_context, **kwargs
            )
        refuse_unknown(a, attention_mask, {name: value for name, value in kwargs.items() if "cache" not in name})
        query_THW = self._rotated(hidden_states, weights, position_embeddings, context)
        attended_THW = context.attention.attend(
            query_THW, context.kv(a.layer_idx), context.batch, a.scaling, self.window(a), None
        )
        context.layer_done(a.layer_idx)
        return a.o_proj(attended_THW.view(1, len(query_THW), -1)), None

    def _takes(self, hidden: torch.Tensor, weights: list[StoredTensor | None], context: ForwardContext) -> bool:
        writer = context.attention
        return (
            isinstance(writer, RotaryWriter)
            and None not in weights
            and hidden.dtype == torch.bfloat16
            and writer.rotates(self.attention.head_dim, context.kv(self.attention.layer_idx))
        )

    def _rotated(
        self,
        hidden_states: torch.Tensor,
        weights: list[StoredTensor],
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        context: ForwardContext,
    ) -> torch.Tensor:
        """Queries [T, H, W]; keys and values are in their slots."""
        a = self.attention
        joined = linears(hidden_states[0], weights, [p.bias for p in (a.q_proj, a.k_proj, a.v_proj)])
        parts = joined.split([weight.shape[0] for weight in weights], -1)
        query, key, value = (part.unflatten(-1, (-1, a.head_dim)) for part in parts)
        cosine, sine = (part[0] for part in position_embeddings)
        query_norm, key_norm = (None if norm is None else norm.weight for norm in self.norms)
        epsilon = 0.0 if self.norms[0] is None else self.norms[0].variance_epsilon
        inputs = RotaryInputs(query, key, value, cosine, sine, query_norm, key_norm, epsilon)
        cast(RotaryWriter, context.attention).rotate_and_write(inputs, context.kv(a.layer_idx), context.batch)
        return query


def join_inputs(attention: nn.Module) -> None:
    """Gives a grouped-query attention module the `forward` above, if its own is one of those that it replaces."""
    window = _WINDOWS.get(inspect.getsource(type(attention).forward))
    definition = inspect.getmodule(type(attention))
    if window is not None and definition is not None and _rotates_halves(definition):
        attention.__dict__["forward"] = GroupedAttention(attention, window)


def _rotates_halves(definition: ModuleType) -> bool:
    """Whether the definition rotates as Llama's does."""
    found = [getattr(definition, name, None) for name in _ROTARY_PARTS]
    return None not in found and [inspect.getsource(function) for function in found] == _ROTARY  # type: ignore[arg-type]
