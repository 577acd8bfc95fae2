"""Paged attention in plain torch, one sequence at a time, in fp32: what the other backends are measured against.

Shapes as in `interface`; C context tokens of one sequence that a block of its queries can see.
"""

import torch

from hpcgen.kernels.attention.interface import AttentionBatch, KVPages

QUERY_BLOCK = 256
"""Queries of one sequence taken at once; bounds the scores held in memory to H * QUERY_BLOCK * C."""


class TorchAttention:
    """Attention on any device and in any dtype."""

    name = "torch"

    def plan(self, batch: AttentionBatch) -> None:
        pass

    def write(self, kv: KVPages, first: torch.Tensor, second: torch.Tensor, batch: AttentionBatch) -> None:
        page_tokens = kv.first.shape[1]
        page, offset = batch.slots // page_tokens, batch.slots % page_tokens
        kv.first[page, offset] = first.to(kv.first.dtype)
        kv.second[page, offset] = second.to(kv.second.dtype)

    def attend(
        self,
        query: torch.Tensor,
        kv: KVPages,
        batch: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        groups = kv.first.shape[2]
        out = query.new_empty(*query.shape[:2], kv.second.shape[3])
        for sequence, rows, first_key, stop_key in _query_blocks(batch, sliding_window):
            key = _gather(kv.first, batch, sequence, first_key, stop_key).float()  # [C, G, D]
            value = _gather(kv.second, batch, sequence, first_key, stop_key).float()  # [C, G, Dv]
            grouped = query[rows].float().unflatten(1, (groups, -1))  # [t, G, H / G, D]
            scores = torch.einsum("tgqd,cgd->gqtc", grouped, key) * scale
            visible = _visible(batch.positions[rows], first_key, stop_key, sliding_window)
            weights = _softmax(scores.masked_fill(~visible, float("-inf")), sinks)
            out[rows] = torch.einsum("gqtc,cgd->tgqd", weights, value).flatten(1, 2).to(out.dtype)
        return out

    def attend_latent(
        self, query_latent: torch.Tensor, query_rope: torch.Tensor, kv: KVPages, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        out = torch.empty_like(query_latent)
        for sequence, rows, first_key, stop_key in _query_blocks(batch, None):
            latent = _gather(kv.first, batch, sequence, first_key, stop_key)[:, 0].float()  # [C, R]
            rope = _gather(kv.second, batch, sequence, first_key, stop_key)[:, 0].float()  # [C, Drope]
            scores = torch.einsum("thr,cr->htc", query_latent[rows].float(), latent)
            scores = (scores + torch.einsum("thd,cd->htc", query_rope[rows].float(), rope)) * scale
            visible = _visible(batch.positions[rows], first_key, stop_key, None)
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("htc,cr->thr", weights, latent).to(out.dtype)
        return out


def _query_blocks(batch: AttentionBatch, sliding_window: int | None):
    """(sequence, rows of T, first key that any of them sees, end of their keys) for blocks of consecutive queries."""
    offsets, lengths = batch.query_offsets.tolist(), batch.context_lengths.tolist()
    for sequence, length in enumerate(lengths):
        position = length - (offsets[sequence + 1] - offsets[sequence])
        for start in range(offsets[sequence], offsets[sequence + 1], QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, offsets[sequence + 1])
            first_key = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            position += stop - start
            yield sequence, slice(start, stop), first_key, position


def _gather(pages: torch.Tensor, batch: AttentionBatch, sequence: int, start: int, stop: int) -> torch.Tensor:
    """Tokens [start, stop) of one sequence out of its pages. Whatever else the pages hold is not looked at."""
    page_tokens = pages.shape[1]
    first_page = start // page_tokens
    table = batch.page_table[sequence, first_page : -(-stop // page_tokens)]
    return pages[table].flatten(0, 1)[start - first_page * page_tokens : stop - first_page * page_tokens]


def _visible(positions: torch.Tensor, start: int, stop: int, sliding_window: int | None) -> torch.Tensor:
    """[t, C]: whether the query at a position sees the key of token start + c."""
    keys = torch.arange(start, stop, device=positions.device)
    visible = keys <= positions[:, None]
    if sliding_window is not None:
        visible &= keys > positions[:, None] - sliding_window
    return visible


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the keys of scores [G, H / G, t, C]; a sink takes its share of the weight and gives no value."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().view(*scores.shape[:2], 1, 1)
    return torch.cat([scores, sink.expand(*scores.shape[:3], 1)], -1).softmax(-1)[..., :-1]
