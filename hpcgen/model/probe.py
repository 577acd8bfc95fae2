"""One forward without data, on the meta device, at load: does a definition use attention and KV as paged KV needs?

It costs the Python of one forward and no arithmetic, and refuses before any work what would else be wrong or fail in
the middle of a batch: attention that goes past the interface, biases or soft caps, KV shared between layers, state
that is not KV. It also finds the shape of the KV-cache.
"""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hpcgen.kernels.attention.interface import AttentionBatch, KVPages
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.kernels.experts.interface import ExpertWeights
from hpcgen.model.errors import ModelError

Shape = tuple[int, int]


@dataclass
class ProbeAttention:
    """An attention backend that computes nothing and notes what it is asked."""

    name: str = "probe"
    asked: list[int] = field(default_factory=list)
    """Layers whose KV pages were asked for, in order: by the cache, then by the attention function."""
    written: list[tuple[Shape, Shape]] = field(default_factory=list)
    """(heads, dimension) of both blocks, by layer."""
    windows: list[int | None] = field(default_factory=list)

    def plan(self, batch: AttentionBatch) -> None:
        """Nothing."""

    def kv(self, layer: int) -> KVPages:
        self.asked.append(layer)
        empty = torch.empty(0, device="meta")
        return KVPages(empty, empty)

    def write(self, kv: KVPages, first: torch.Tensor, second: torch.Tensor, batch: AttentionBatch) -> None:
        self.written.append(((first.shape[1], first.shape[2]), (second.shape[1], second.shape[2])))

    def attend(
        self,
        query: torch.Tensor,
        kv: KVPages,
        batch: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.windows.append(sliding_window)
        value_dim = self.written[-1][1][1] if self.written else query.shape[2]
        return query.new_empty(*query.shape[:2], value_dim)

    def attend_latent(
        self, query_latent: torch.Tensor, query_rope: torch.Tensor, kv: KVPages, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        self.windows.append(None)
        return torch.empty_like(query_latent)


class ProbeExperts:
    """An experts backend that computes nothing."""

    name = "probe"

    def forward(
        self, weights: ExpertWeights, hidden: torch.Tensor, top_index: torch.Tensor, top_weight: torch.Tensor
    ) -> torch.Tensor:
        return torch.empty_like(hidden)


def probe_batch(tokens: int) -> AttentionBatch:
    """One sequence of `tokens` new tokens, on the meta device."""
    return AttentionBatch(
        query_offsets=torch.tensor([0, tokens], dtype=torch.int32),
        context_lengths=torch.tensor([tokens], dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32, device="meta"),
        positions=torch.zeros(tokens, dtype=torch.int64, device="meta"),
        slots=torch.zeros(tokens, dtype=torch.int64, device="meta"),
    )


def kv_layout_found(model: PreTrainedModel, probe: ProbeAttention, layers: int, dtype: torch.dtype) -> KVLayout:
    """The KV layout that a probed forward showed. Raises ModelError where it is not one that pages can hold."""
    expected = [layer for layer in range(layers) for _ in range(2)]
    if probe.asked != expected:
        _refuse(
            model, "not every layer writes keys and values once and attends to them through the attention interface"
        )
    if len(set(probe.written)) != 1:
        _refuse(model, "its layers have keys and values of different shapes")
    for layer, window in enumerate(_windows_asked(model.config, layers)):
        if probe.windows[layer] != window:
            _refuse(model, f"the attention window of layer {layer}, {window}, does not reach the attention interface")
    (first_heads, first_dim), (second_heads, second_dim) = probe.written[0]
    return KVLayout(layers, first_heads, first_dim, second_heads, second_dim, dtype)


def _windows_asked(config: PreTrainedConfig, layers: int) -> list[int | None]:
    """The sliding window of each layer as the configuration has it; None for full attention."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds[:layers]]


def _refuse(model: PreTrainedModel, reason: str) -> None:
    raise ModelError(f"{type(model).__name__} is not supported: {reason}.")
