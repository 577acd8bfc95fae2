"""Room to compute in: what a sweep needs on a device besides parameters and KV."""

from dataclasses import dataclass

EXPERT_TOKENS = 8192
"""Most tokens that the experts of a layer work on at once; a larger batch goes through them in parts."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Elements of a token in the parts of a model."""

    hidden: int
    vocabulary: int
    queries: int
    """All heads together."""
    dense: int
    """Intermediate width of a plain MLP; 0 without any."""
    expert: int = 0
    """Intermediate width of one expert."""
    experts_per_token: int = 0


def sweep_bytes(widths: Widths, microbatch: int, tokens: int, itemsize: float) -> int:
    """Estimate of the bytes that a sweep over `tokens` tokens works in, in microbatches of `microbatch` tokens.

    Two hidden states of every token wait in the coroutines; attention and head work on a microbatch in fp32, dense MLPs
    on all tokens, experts on a part of them.
    """
    dense = 2 * widths.dense * tokens
    experts = widths.experts_per_token * (2 * widths.expert + widths.hidden) * min(tokens, EXPERT_TOKENS)
    attention, logits = 16 * microbatch * widths.queries, 8 * microbatch * widths.vocabulary
    return int((2 * widths.hidden * tokens + max(dense, experts)) * itemsize + attention + logits)
