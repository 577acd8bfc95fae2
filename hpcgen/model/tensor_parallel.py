"""PARTITION: one rank's shard of every decoder layer, for a straggler that several ranks decode together.

A shard is the same definition with narrower weights: its attention has the rank's heads, its MLPs and experts the
rank's rows, and what attention and experts stages return are partial sums. Grouped-query attention divides KV by
heads; multi-head latent attention has one latent for all heads, so each rank keeps all of it. Embedding, norms, routers
and head are whole on every rank: all ranks compute the same logits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.binding import BoundUnit
from hpcgen.model.causal import CausalModel
from hpcgen.model.tensor_parallel_plan import Heads, Split, head_counts, heads_of_ranks, layer_splits, part_of

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the ranks; may do so in place."""


class TensorParallelShard:
    """What rank `rank` of `ranks` holds of `model`, which may itself be the one that runs the shard.

    Raises ModelError for a model that cannot be divided so.
    """

    def __init__(self, model: CausalModel, rank: int, ranks: int) -> None:
        self.model = model
        self.rank = rank
        self.ranks = ranks
        self._all_heads = heads_of_ranks(*head_counts(model.config), ranks)
        self.heads: Heads = self._all_heads[rank]
        self.kv_layout: KVLayout = self._layout_of(self.heads)
        self._splits: dict[str, Split] = {}
        for index in range(model.layers):
            self._splits.update(layer_splits(model, index))

    def shard(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """This rank's parts of parameters, by name. Views where that is possible, else copies.

        Packed and quantised tensors that are divided become plain ones of the model's dtype: blocks that share a
        scale do not end where heads do.
        """
        return {name: self._part(stored, self._splits.get(name, Split())) for name, stored in tensors.items()}

    def prepare(self, unit: str, tensors: Mapping[str, StoredTensor]) -> BoundUnit:
        """As `CausalModel.prepare`, of this rank's parts of the whole tensors of a unit."""
        return self.prepare_parts(unit, self.shard({name: tensors[name] for name in self.model.units[unit]}))

    def prepare_parts(self, unit: str, parts: Mapping[str, StoredTensor]) -> BoundUnit:
        """As `prepare`, of what `shard` gives."""
        return self.model.prepare(unit, parts, shapes={name: stored.shape for name, stored in parts.items()})

    def part_layout(self, name: str, stored: StoredTensor) -> StoredTensor:
        """What `shard` would make of a whole tensor, without its data (on the meta device)."""
        split = self._splits.get(name, Split())
        if split.makes_partial_sums and stored.layout != "plain":
            dtype = self.model.dtype
            stored = StoredTensor(torch.empty(stored.shape, dtype=dtype, device="meta"), stored.shape)
        scale = None if stored.scale is None else stored.scale.to("meta")
        return self._part(replace(stored, data=stored.data.to("meta"), scale=scale), split)

    def slice_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """This rank's heads of whole KV pages: uint8 [P, page_bytes] -> uint8 [P, self.kv_layout.page_bytes]."""
        if self.model.latent_attention:
            return pages
        own = pages.new_empty(len(pages), self.kv_layout.page_bytes)
        heads = slice(self.heads.kv.start, self.heads.kv.stop)
        for whole, part in zip(self.model.kv_layout.views(pages), self.kv_layout.views(own), strict=True):
            part.first.copy_(whole.first[:, :, heads])
            part.second.copy_(whole.second[:, :, heads])
        return own

    def merge_pages(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Whole KV pages out of those of all ranks, in their order; the inverse of `slice_pages`."""
        if self.model.latent_attention:
            return shards[0]
        layout = self.model.kv_layout
        pages = shards[0].new_empty(len(shards[0]), layout.page_bytes)
        for heads, shard in zip(self._all_heads, shards, strict=True):
            held = slice(heads.kv.start, heads.kv.stop)
            for whole, part in zip(layout.views(pages), self._layout_of(heads).views(shard), strict=True):
                whole.first[:, :, held].copy_(part.first)
                whole.second[:, :, held].copy_(part.second)
        return pages

    def sum_partials(self, all_reduce: AllReduce) -> Callable[[], None]:
        """Makes the attention and experts stages of the model return sums over the ranks; returns what undoes it."""
        stages = [
            stage
            for index in range(self.model.layers)
            for stage in (self.model.attention_stage(index), self.model.experts_stage(index))
        ]
        before = [stage.__dict__.get("forward") for stage in stages]
        for stage in stages:
            stage.__dict__["forward"] = _SummedStage(stage.forward, all_reduce)

        def undo() -> None:
            for stage, forward in zip(stages, before, strict=True):
                if forward is None:
                    del stage.__dict__["forward"]
                else:
                    stage.__dict__["forward"] = forward

        return undo

    def _layout_of(self, heads: Heads) -> KVLayout:
        if self.model.latent_attention:
            return self.model.kv_layout
        return replace(self.model.kv_layout, first_heads=len(heads.kv), second_heads=len(heads.kv))

    def _part(self, stored: StoredTensor, split: Split) -> StoredTensor:
        if not split.makes_partial_sums:
            return stored
        whole = stored.data if stored.layout == "plain" else dequantize(stored, self.model.dtype)
        if split.dimension is None:
            part = whole if self.rank == 0 else torch.zeros_like(whole)
        else:
            part = self._narrow(whole, split, split.dimension)
        return StoredTensor(part, tuple(part.shape))

    def _narrow(self, whole: torch.Tensor, split: Split, dimension: int) -> torch.Tensor:
        rows = whole.shape[dimension] // (split.packed * split.interleaved)
        if split.heads is None:
            own = part_of(rows, self.rank, self.ranks)
        else:
            query_heads, kv_heads = head_counts(self.model.config)
            heads, count = (self.heads.query, query_heads) if split.heads == "query" else (self.heads.kv, kv_heads)
            width = rows // count
            own = range(heads.start * width, heads.stop * width)
        blocks = whole.unflatten(dimension, (split.packed, rows * split.interleaved))
        part = blocks.narrow(dimension + 1, own.start * split.interleaved, len(own) * split.interleaved)
        return part.flatten(dimension, dimension + 1).contiguous()


class _SummedStage:
    """The `forward` of a stage whose output is a partial sum, followed by the sum over ranks."""

    def __init__(self, forward: Callable[..., Any], all_reduce: AllReduce) -> None:
        self.forward = forward
        self.all_reduce = all_reduce

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.forward(*args, **kwargs)
        if isinstance(output, tuple):
            return (self.all_reduce(output[0]), *output[1:])
        return self.all_reduce(output)
