"""Operations and bytes of each part of a layer, for one rank. Counts follow from the model's shape alone."""

from __future__ import annotations

from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.roofline import Work

ACTIVATION_BYTES = 2


def projections(shape: ModelShape, tokens: float) -> Work:
    """Query, key, value and output projections of one layer."""
    parameters = shape.attention.parameters
    moved = tokens * (2 * shape.hidden + 2 * shape.attention.query_width) * ACTIVATION_BYTES
    return Work(2 * parameters * tokens, parameters * shape.weight_bytes + moved)


def decode_attention(shape: ModelShape, context: float, sequences: float) -> Work:
    """One query of each of `sequences` sequences over `context` tokens in all, in one layer."""
    if sequences <= 0:
        return Work()
    seen = sequences * shape.attention.context(context / sequences)
    return Work(shape.attention.decode_flops * seen, shape.attention.kv_elements * shape.kv_bytes * seen)


def prefill_attention(shape: ModelShape, tokens: float, length: float) -> Work:
    """`tokens` prompt tokens of sequences that are `length` tokens long, causal, in one layer."""
    pairs = tokens * shape.attention.context(length / 2)
    return Work(shape.attention.prefill_flops * pairs, 2 * shape.attention.kv_elements * shape.kv_bytes * tokens)


def dense_mlp(shape: ModelShape, tokens: float) -> Work:
    """The MLP of a dense layer."""
    return _linear(shape.dense_parameters, shape.weight_bytes, shape.hidden, tokens)


def shared_experts(shape: ModelShape, tokens: float) -> Work:
    """Shared experts and router of one layer."""
    if not shape.shared_parameters:
        return Work()
    return _linear(shape.shared_parameters, shape.weight_bytes, shape.hidden, tokens)


def routed_experts(shape: ModelShape, tokens: float, ranks: int = 1) -> Work:
    """A rank's share of the routed experts of one layer, for `tokens` tokens of all `ranks` ranks together.

    Weights are read of the experts that at least one token chose, where tokens choose independently and evenly.
    """
    if not shape.experts or tokens <= 0:
        return Work()
    pairs = tokens * shape.experts_per_token / ranks
    chosen = chosen_experts(shape, tokens, ranks)
    moved = pairs * 4 * shape.hidden * ACTIVATION_BYTES
    return Work(2 * shape.expert_parameters * pairs, chosen * shape.expert_parameters * shape.expert_bytes + moved)


def chosen_experts(shape: ModelShape, tokens: float, ranks: int = 1) -> float:
    """Experts of a rank that at least one of `tokens` tokens chose."""
    if not shape.experts:
        return 0.0
    return shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** tokens) / ranks


def head(shape: ModelShape, rows: float) -> Work:
    """Logits of `rows` tokens."""
    logits = rows * shape.vocabulary * 4
    return Work(2 * shape.vocabulary * shape.hidden * rows, shape.head_bytes + logits)


def dispatched_bytes(shape: ModelShape, tokens: float, places: int) -> float:
    """Bytes that a rank sends in dispatch and again, in 16 bits, in combine, when experts are spread over `places`.

    A token goes once to each place (rank or node) that has one of its experts; its own place costs nothing.
    """
    if places < 2 or not shape.experts:
        return 0.0
    distinct = places * (1 - (1 - 1 / places) ** shape.experts_per_token)
    return tokens * distinct * (places - 1) / places * shape.hidden * ACTIVATION_BYTES


def _linear(parameters: int, weight_bytes: float, hidden: int, tokens: float) -> Work:
    return Work(2 * parameters * tokens, parameters * weight_bytes + 4 * tokens * hidden * ACTIVATION_BYTES)
