"""What one forward of one microbatch carries with it: its ragged batch, its attention backend and its KV pages.

Forwards of several microbatches are suspended and resumed interleaved, so nothing of it may be global: the context
travels as a keyword argument to the attention function, and in the `Cache` that the model passes along.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from hpcgen.kernels.attention.interface import AttentionBackend, AttentionBatch, KVPages


def _nothing(layer_index: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Read by every layer of one forward; `kv` may be asked twice in a layer, to write and to attend."""

    batch: AttentionBatch
    attention: AttentionBackend
    """Its `plan(batch)` has been called."""
    kv: Callable[[int], KVPages]
    """The KV pages of a layer, asked for when the layer runs."""
    layer_done: Callable[[int], None] = _nothing
    """Called when a layer has written its new KV and read what it needs: its pages may be copied away."""

    def write(self, layer_index: int, first_GTD: torch.Tensor, second_GTD: torch.Tensor) -> None:
        """Writes the new tokens' KV of a layer to their slots, heads before tokens as transformers has them."""
        self.attention.write(self.kv(layer_index), first_GTD.transpose(0, 1), second_GTD.transpose(0, 1), self.batch)


class PagedCache(Cache):
    """The `Cache` that a transformers model writes to: new KV go to their slots in the pages, and come back alone.

    Older keys and values stay in the pages, where the attention function finds them. One object serves one forward.
    """

    def __init__(self, context: ForwardContext) -> None:
        super().__init__(layers=[])
        self.context = context

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states [1, G, T, D] and value_states [1, G, T, Dv], returned as they came."""
        self.context.write(layer_idx, key_states[0], value_states[0])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always given, and no mask is made from it."""
        return 0
