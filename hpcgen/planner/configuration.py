"""A configuration of an instance, and the memory that it uses."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.memory.activations import Widths, sweep_bytes
from hpcgen.planner.model_shape import ModelShape
from hpcgen.scheduler.plan import Limits
from hpcgen.sequence import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class PhaseConfiguration:
    """Batch sizes and buffers of one rank in one phase."""

    attention_batch: int
    """`B_attn`: tokens (prefill) or sequences (decode) of one attention call."""
    expert_batch: int
    """`B_moe`: tokens of a wave, or sequences that decode at once."""
    resident_layers: int
    """Layers whose parameters stay on the device."""
    ring_slots: int
    """Layers that the ring buffer holds; 0 when all are resident."""
    kv_bytes: float = 0.0
    """KV on the device: two layers of a microbatch (prefill), pages (decode)."""
    kv_streamed: bool = False
    """Decode with KV in the host store, restored layer by layer at every step."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the planner chooses for an instance of `ranks` ranks."""

    ranks: int
    ranks_per_node: int
    prefill: PhaseConfiguration
    decode: PhaseConfiguration
    host_pages: int
    """KV pages of the host store of a node."""
    watermark: float = 0.9
    refill_below: float = 0.5
    partition_below: int = 0
    migrate: bool = True
    """Whether KV is had sooner from another node than by computing it again."""
    in_place: bool = False
    """The host store is the device: no copies, no limit but that of the host."""

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    def limits(self, shape: ModelShape, decision_steps: int = PAGE_TOKENS) -> Limits:
        """What the scheduler is told."""
        page = shape.kv_token_bytes * PAGE_TOKENS
        unlimited = self.in_place or self.decode.kv_streamed
        return Limits(
            host_pages=self.host_pages,
            device_pages=None if unlimited else int(self.decode.kv_bytes // page),
            wave_tokens=self.prefill.expert_batch,
            max_active=self.decode.expert_batch,
            decision_steps=decision_steps,
            watermark=self.watermark,
            refill_below=self.refill_below,
            partition_below=self.partition_below,
            migrate=self.migrate and self.nodes > 1,
        )


def layer_bytes(shape: ModelShape, ranks: int) -> float:
    """Mean bytes of the parameters of a layer that one of `ranks` ranks needs, experts spread over them (1: all)."""
    moe = shape.moe_layers * (shape.experts_bytes / ranks + shape.shared_parameters * shape.weight_bytes)
    dense = shape.dense_layers * shape.dense_parameters * shape.weight_bytes
    return shape.attention_bytes + (moe + dense) / shape.layers


def embedding_bytes(shape: ModelShape) -> float:
    """Embedding and head: resident in both phases."""
    return shape.head_bytes * (1 if shape.tied_embedding else 2)


def activation_bytes(shape: ModelShape, attention_batch: int, expert_batch: int) -> float:
    """Room to compute in, as the engine reckons it."""
    widths = Widths(
        hidden=shape.hidden,
        vocabulary=shape.vocabulary,
        queries=shape.attention.query_width,
        dense=shape.dense_parameters // (3 * shape.hidden),
        expert=shape.expert_parameters // (3 * shape.hidden),
        experts_per_token=shape.experts_per_token,
    )
    return sweep_bytes(widths, attention_batch, expert_batch, shape.kv_bytes)


def device_bytes(shape: ModelShape, phase: PhaseConfiguration, ranks: int) -> dict[str, float]:
    """Bytes on one device by use. `ranks`: over how many experts are spread (prefill: 1)."""
    one = layer_bytes(shape, ranks)
    return {
        "resident layers": phase.resident_layers * one,
        "ring buffer": phase.ring_slots * one,
        "embedding and head": embedding_bytes(shape),
        "KV": phase.kv_bytes,
        "activations": activation_bytes(shape, phase.attention_batch, phase.expert_batch),
    }
