"""The attention function that transformers' definitions call: attention over pages by the context's backend.

It is registered for attention but not for masks, so that the definitions make no masks.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hpcgen.model.errors import ModelError
from hpcgen.model.forward_context import ForwardContext

IMPLEMENTATION = "hpcgen"
"""The name under which attention and experts are registered with transformers."""
_WITHOUT_EFFECT = {"dropout", "is_causal", "output_attentions", "position_ids", "use_cache"}
"""Arguments of the attention function that change nothing in inference over causal pages."""


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    forward_context: ForwardContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D] -> [1, T, H, Dv]. `key` and `value` are already in the pages; `s_aux` [H] are the sinks.

    Raises ModelError where the definition asks for something that paged attention does not do.
    """
    refuse_unknown(module, attention_mask, kwargs)
    if forward_context is None:
        raise ModelError(f"{type(module).__name__} is not supported: its layers do not pass arguments on to attention.")
    layer: int = module.layer_idx  # type: ignore[assignment]
    attended = forward_context.attention.attend(
        query[0].transpose(0, 1),
        forward_context.kv(layer),
        forward_context.batch,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        s_aux,
    )
    forward_context.layer_done(layer)
    return attended[None], None


def refuse_unknown(module: nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raises ModelError where a definition's attention is given what paged attention does not do."""
    asked = [
        name
        for name, value in kwargs.items()
        if name not in _WITHOUT_EFFECT and value is not None and value is not False
    ]
    if attention_mask is not None:
        asked.append("an attention mask or bias of its own")
    if kwargs.get("is_causal") is False:
        asked.append("attention that is not causal")
    if asked:
        raise ModelError(f"{type(module).__name__} is not supported: it needs {', '.join(asked)} in attention.")


AttentionInterface.register(IMPLEMENTATION, paged_attention)
