"""How the parameters of a decoder layer are divided among tensor-parallel ranks: transformers' own plans, completed.

A plan names a style for modules and parameters. Here each becomes a `Split` of a parameter, by whole heads in
attention and by single rows elsewhere. Ranks may get uneven parts.
"""

from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedConfig

from hpcgen.model.causal import CausalModel
from hpcgen.model.errors import ModelError
from hpcgen.model.units import layer_unit

REPLICATED_STYLES = {"replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "activation", "replicate"}
KV_HEAD_MODULES = {"k_proj", "v_proj"}


class Heads(NamedTuple):
    """Heads of one rank."""

    query: range
    kv: range


@dataclass(frozen=True, slots=True)
class Split:
    """`dimension` of a parameter is `packed` blocks one after another, each of rows of `interleaved` elements that are
    divided evenly, or by `heads`. None: every rank has all of it; `first_rank_only`: other ranks have zeros."""

    dimension: int | None = None
    heads: str | None = None
    """'query' or 'kv'."""
    packed: int = 1
    interleaved: int = 1
    first_rank_only: bool = False

    @property
    def makes_partial_sums(self) -> bool:
        return self.dimension is not None or self.first_rank_only


def heads_of_ranks(query_heads: int, kv_heads: int, ranks: int) -> list[Heads]:
    """Heads by rank: whole groups of query heads that share a KV head, or parts of one group.

    With no more ranks than KV heads each KV head has one rank, and some ranks may have one more than others. With more
    ranks, KV heads are replicated, and the query heads of a group are divided among the ranks that hold its KV head.
    Raises ModelError for more ranks than query heads.
    """
    if ranks > query_heads:
        raise ModelError(f"{query_heads} attention heads cannot be divided among {ranks} ranks: use fewer.")
    group = query_heads // kv_heads
    if ranks <= kv_heads:
        parts = [part_of(kv_heads, rank, ranks) for rank in range(ranks)]
        return [Heads(range(kv.start * group, kv.stop * group), kv) for kv in parts]
    holders = [part_of(ranks, head, kv_heads) for head in range(kv_heads)]
    heads = []
    for head, sharing in enumerate(holders):
        for place in range(len(sharing)):
            part = part_of(group, place, len(sharing))
            heads.append(Heads(range(head * group + part.start, head * group + part.stop), range(head, head + 1)))
    return heads


def part_of(total: int, rank: int, ranks: int) -> range:
    """The part of [0, total) that belongs to a rank; parts differ by at most one."""
    return range(rank * total // ranks, (rank + 1) * total // ranks)


def head_counts(config: PreTrainedConfig) -> tuple[int, int]:
    """(query heads, KV heads) of grouped-query attention."""
    query: int = config.num_attention_heads
    return query, getattr(config, "num_key_value_heads", None) or query


def layer_splits(model: CausalModel, index: int) -> dict[str, Split]:
    """The split of each parameter of a decoder layer, by full name.

    Raises ModelError where the plan has a style that shards of whole modules cannot follow, or where a stage would not
    give partial sums, so that adding up the ranks' outputs would be wrong.
    """
    plan = _plan_of_layer(model)
    prefix = f"{model.family.layers}.{index}."
    splits = {}
    for name in model.units[layer_unit(index)]:
        path = name.removeprefix(prefix)
        style = plan.get(path) or plan.get(path.rpartition(".")[0])
        splits[name] = _split(model, path, style, len(model.shape_of(name)))
    for stage in (model.family.attention, model.family.experts):
        if not any(split.makes_partial_sums for name, split in splits.items() if name.startswith(f"{prefix}{stage}.")):
            raise ModelError(f"Model type '{model.family.name}' has no tensor-parallel plan for '{stage}'.")
    return splits


def _plan_of_layer(model: CausalModel) -> dict[str, str]:
    prefix = "layers.*."
    own = model.config.base_model_tp_plan or {}
    plan = {name.removeprefix(prefix): style for name, style in own.items() if name.startswith(prefix)}
    return {**plan, **model.family.tensor_parallel}


def _split(model: CausalModel, path: str, style: str | None, dimensions: int) -> Split:
    if style is None or style in REPLICATED_STYLES:
        return Split()
    *modules, leaf = path.split(".")
    is_bias = leaf == "bias" or leaf.endswith("_bias")
    heads = None
    if path.startswith(f"{model.family.attention}."):
        heads = "kv" if KV_HEAD_MODULES & set(modules) else "query"
    if style == "colwise":
        return Split(0, heads)
    if style == "rowwise" and is_bias:
        return Split(first_rank_only=True)
    if style == "rowwise":
        return Split(dimensions - 1, heads)
    if style == "rowwise_transposed":
        return Split(dimensions - 2, heads)
    if style == "packed_colwise":
        return Split(dimensions - 2, packed=2)
    if style == "interleaved_colwise":
        return Split(dimensions - 1, interleaved=2)
    raise ModelError(f"Model type '{model.family.name}' cannot be partitioned: '{path}' is '{style}' in its plan.")
