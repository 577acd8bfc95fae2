"""Microbatches: which spans of which sequences one attention call works on, and how it sees them."""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from hpcgen.kernels.attention.interface import AttentionBatch
from hpcgen.memory.kv.interface import Span
from hpcgen.sequence import PAGE_TOKENS, pages_for


def pack(spans: Seq[Span], tokens: int, pages: int) -> list[list[Span]]:
    """Cuts spans, in their order, into microbatches of at most `tokens` new tokens and `pages` pages of context.

    A span longer than what is left of a microbatch is continued in the next ones. `pages` must hold the longest
    sequence alone.
    """
    microbatches: list[list[Span]] = []
    free_tokens = free_pages = 0
    for span in spans:
        start = span.start
        while start < span.stop:
            # As many pages as the context may reach with the tokens that are left, page by page.
            room = min(span.stop - start, free_tokens, free_pages * PAGE_TOKENS - start)
            if room <= 0:
                if microbatches and not microbatches[-1]:
                    raise ValueError(f"{pages} pages do not hold {start + 1} tokens of one sequence")
                microbatches.append([])
                free_tokens, free_pages = tokens, pages
                continue
            stop = start + room
            microbatches[-1].append(Span(span.sequence, start, stop))
            free_tokens -= room
            free_pages -= pages_for(stop)
            start = stop
    return microbatches


def page_table(tables: Seq[Seq[int]]) -> np.ndarray:
    """Page lists of B sequences as int32 [B, M], filled up with 0."""
    width = max((len(table) for table in tables), default=0)
    result = np.zeros((len(tables), max(width, 1)), dtype=np.int32)
    for row, table in enumerate(tables):
        result[row, : len(table)] = table
    return result


def attention_batch(starts: np.ndarray, stops: np.ndarray, table: np.ndarray, device: torch.device) -> AttentionBatch:
    """The batch in which sequence b adds tokens [starts[b], stops[b]); table int32 [B, M]."""
    counts = stops - starts
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts) + np.repeat(starts, counts)
    slots = table[rows, positions // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS
    used = int(pages_for(int(stops.max()))) if len(stops) else 1
    return AttentionBatch(
        query_offsets=torch.from_numpy(offsets),
        context_lengths=torch.from_numpy(stops.astype(np.int32)),
        page_table=torch.from_numpy(np.ascontiguousarray(table[:, :used])).to(device),
        positions=torch.from_numpy(positions.astype(np.int64)).to(device),
        slots=torch.from_numpy(slots).to(device),
    )
