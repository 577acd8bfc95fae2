"""Which KV is saved first where time may run out: what would cost most to recompute, for the bytes it takes."""

from collections.abc import Callable
from typing import NamedTuple

from hpcgen.sequence import pages_for

RecomputeCost = Callable[[int], float]
"""Cost, in any unit, of a prefill of so many tokens."""

ATTENTION_PARITY = 8192
"""Tokens at which attention costs as much as all else, for a model of usual shape; a profile knows better."""


def recompute_cost(tokens: int) -> float:
    """Cost of a prefill in units of one short token's: linear layers, and attention over the tokens before."""
    return tokens * (1 + tokens / ATTENTION_PARITY)


class PageRow(NamedTuple):
    """One page to save."""

    sequence: int
    """Row of the sequence in the columns."""
    number: int
    """Page i of the sequence: it holds tokens [64 i, 64 i + 64)."""
    page: int
    """Page of the host store."""


def save_order(kv_tokens: list[int], pages: list[list[int]], cost: RecomputeCost = recompute_cost) -> list[PageRow]:
    """Pages to save, best first: sequences by the cost of recomputing them for a page, each from its first page on.

    A sequence's pages stay together, since a page is worth nothing without those before it.

    Args:
        kv_tokens: tokens of each sequence whose KV is stored.
        pages: host pages of each sequence.
    """
    counts = [min(pages_for(tokens), len(own)) for tokens, own in zip(kv_tokens, pages, strict=True)]
    holders = [s for s, count in enumerate(counts) if count]
    holders.sort(key=lambda s: cost(kv_tokens[s]) / counts[s], reverse=True)
    return [PageRow(s, i, pages[s][i]) for s in holders for i in range(counts[s])]
