"""Ragged batches over paged KV for the attention tests: pages in random order, everything unused is NaN."""

from dataclasses import dataclass

import torch

from hpcgen.kernels.attention.interface import AttentionBackend, AttentionBatch, KVPages
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.sequence import PAGE_TOKENS, pages_for

LAYERS, LAYER = 3, 1


@dataclass
class Ragged:
    """Sequences given as (new tokens, tokens of context, the new ones included)."""

    kv: KVPages
    raw: torch.Tensor
    """All layers of all pages, [P, elements]."""
    old: AttentionBatch
    """Writes what the context holds before the step."""
    new: AttentionBatch

    def fill(self, backend: AttentionBackend, seed: int = 0) -> None:
        """Random keys and values for every token of the context."""
        generator = torch.Generator().manual_seed(seed)
        for batch in (self.old, self.new):
            tokens = len(batch.positions)
            first, second = (
                torch.randn(tokens, *pages.shape[2:], generator=generator).to(pages.dtype) for pages in self.kv
            )
            backend.write(self.kv, first, second, batch)


def ragged(sequences: list[tuple[int, int]], first: tuple[int, int], second: tuple[int, int], dtype) -> Ragged:
    """`first` and `second`: heads and width of the two blocks of KV."""
    generator = torch.Generator().manual_seed(1)
    layout = KVLayout(LAYERS, *first, *second, dtype)
    counts = [pages_for(context) for _, context in sequences]
    total = sum(counts) + 2
    raw = torch.full((total, layout.page_bytes // dtype.itemsize), float("nan"), dtype=dtype)
    order = torch.randperm(total, generator=generator).int()
    table = torch.zeros(len(sequences), max(counts, default=0), dtype=torch.int32)
    used = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[used : used + count]
        used += count
    contexts = [context for _, context in sequences]
    lengths_before = [context - new for new, context in sequences]
    return Ragged(
        layout.layer_view(raw, LAYER * layout.layer_elements),
        raw,
        _batch(table, [0] * len(sequences), lengths_before),
        _batch(table, lengths_before, contexts),
    )


def _batch(table: torch.Tensor, starts: list[int], stops: list[int]) -> AttentionBatch:
    offsets, positions, slots = [0], [], []
    for row, start, stop in zip(table.tolist(), starts, stops, strict=True):
        positions += range(start, stop)
        slots += [row[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for t in range(start, stop)]
        offsets.append(len(positions))
    return AttentionBatch(
        torch.tensor(offsets, dtype=torch.int32),
        torch.tensor(stops, dtype=torch.int32),
        table,
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
    )
