"""PARTITION: shards of a model, run side by side in greenlets that meet at every sum, give its tokens."""

from functools import partial

import pytest
import torch
from greenlet import getcurrent, greenlet

from hpcgen.coroutine.call import Stage, YieldPoint
from hpcgen.coroutine.hub import Hub
from hpcgen.coroutine.wrapper import wrap
from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.causal import CausalModel
from hpcgen.model.errors import ModelError
from hpcgen.model.tensor_parallel import TensorParallelShard
from hpcgen.model.tensor_parallel_plan import heads_of_ranks, part_of
from hpcgen.model.units import layer_unit

from .paged import PagedRunner, bound_model, stored_weights
from .tiny_models import TINY, VOCABULARY, build_tiny

TOLERANCE = 3e-5
"""fp32; partial sums are added in another order than within one matrix product."""


def suspend_for_sum(tensor: torch.Tensor) -> torch.Tensor:
    return getcurrent().parent.switch(tensor)


def run_together(forwards: list) -> list[torch.Tensor]:
    """Runs one forward a rank; where all have come to a sum, each goes on with the total."""
    ranks = [greenlet(forward) for forward in forwards]
    outcomes = [rank.switch() for rank in ranks]
    while not ranks[0].dead:
        total = torch.stack(outcomes).sum(0)
        outcomes = [rank.switch(total.clone()) for rank in ranks]
    assert all(rank.dead for rank in ranks)
    return outcomes


def run_one(runner: PagedRunner, tokens: torch.Tensor) -> torch.Tensor:
    return runner.run({0: tokens})[0]


def sharded_runners(reference, name: str, ranks: int, sequences: int) -> list[PagedRunner]:
    weights = stored_weights(reference)
    runners = []
    for rank in range(ranks):
        model = bound_model(reference, TINY[name][0], torch.float32)
        shard = TensorParallelShard(model, rank, ranks)
        for unit in model.units:
            shard.prepare(unit, weights).apply()
        shard.sum_partials(suspend_for_sum)
        runners.append(PagedRunner(model, sequences, layout=shard.kv_layout))
    return runners


# 3 ranks do not divide heads and intermediate sizes evenly; 8 are more than there are KV heads.
@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, ranks) for name in TINY for ranks in (2, 3)), ("qwen2", 8), ("gpt_oss", 8)]
)
def test_shards_give_the_tokens_of_the_whole_model(name, ranks):
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randint(3, VOCABULARY, (70,), generator=generator)
    reference = build_tiny(name, torch.float32)
    whole = PagedRunner(bound_model(reference, TINY[name][0], torch.float32), 1)
    runners = sharded_runners(reference, name, ranks, 1)
    tokens = prompt
    with torch.inference_mode():
        for _ in range(4):
            expected = whole.run({0: tokens})[0]
            found = run_together([partial(run_one, runner, tokens) for runner in runners])
            for logits in found:
                torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
                assert torch.equal(logits[-1].argmax(), expected[-1].argmax())
            tokens = expected[-1:].argmax(-1)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_partition_in_one_process_runs_the_shards_of_a_stage_and_adds_them(name):
    reference = build_tiny(name, torch.float32)
    weights = stored_weights(reference)
    model = bound_model(reference, TINY[name][0], torch.float32)
    tokens = torch.arange(3, 40)
    with torch.inference_mode():
        expected = PagedRunner(model, 1).run({0: tokens})[0]
        shard_models = [bound_model(reference, TINY[name][0], torch.float32) for _ in range(3)]
        hub = Hub(before=lambda point: None, expert_batch=64)
        for index in range(model.layers):
            for rank, shard_model in enumerate(shard_models):
                TensorParallelShard(shard_model, rank, 3).prepare(layer_unit(index), weights).apply()
            shards = [shard_model.experts_stage(index) for shard_model in shard_models]
            policy = partial(partition_over, shards)
            wrap(model.experts_stage(index), YieldPoint(index, Stage.EXPERTS), hub, policy)
        found = hub.run([partial(run_one, PagedRunner(model, 1), tokens)])[0]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def partition_over(shards, call, primitives):
    return primitives.partition(call, shards)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_decode_continues_on_shards_from_the_pages_of_the_whole_model(name):
    reference = build_tiny(name, torch.float32)
    model = bound_model(reference, TINY[name][0], torch.float32)
    whole = PagedRunner(model, 1)
    with torch.inference_mode():
        whole.run({0: torch.arange(3, 80)})
        runners = sharded_runners(reference, name, 2, 1)
        for rank, runner in enumerate(runners):
            runner.take_pages_from(whole, TensorParallelShard(model, rank, 2).slice_pages)
        expected = whole.run({0: torch.tensor([7])})[0]
        found = run_together([partial(run_one, runner, torch.tensor([7])) for runner in runners])
        torch.testing.assert_close(found[1], expected, atol=TOLERANCE, rtol=0)
        merged = TensorParallelShard(model, 0, 2).merge_pages([runner.pages for runner in runners])
        for layer, kv in enumerate(model.kv_layout.views(merged)):
            page = whole.tables[0][0]
            torch.testing.assert_close(kv.first[page], whole.kv[layer].first[page], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(kv.second[page], whole.kv[layer].second[page], atol=TOLERANCE, rtol=0)


def test_undoing_the_sums_gives_the_stages_back():
    model = bound_model(build_tiny("deepseek_v3", torch.float32), "deepseek_v3", torch.float32)
    before = [model.attention_stage(0).forward, model.experts_stage(0).forward]
    undo = TensorParallelShard(model, 0, 2).sum_partials(suspend_for_sum)
    assert model.attention_stage(0).forward != before[0]
    undo()
    assert [model.attention_stage(0).forward, model.experts_stage(0).forward] == before


@pytest.mark.parametrize(("query", "kv", "ranks"), [(8, 4, 2), (8, 4, 3), (8, 2, 5), (8, 8, 3), (8, 1, 8), (12, 3, 4)])
def test_ranks_divide_the_query_heads_and_hold_the_kv_heads_that_they_need(query, kv, ranks):
    heads = heads_of_ranks(query, kv, ranks)
    assert len(heads) == ranks
    assert [head for rank in heads for head in rank.query] == list(range(query))
    group = query // kv
    for rank in heads:
        assert sorted({head // group for head in rank.query}) == list(rank.kv)
        assert len(rank.kv) == 1 or len(rank.query) == group * len(rank.kv)


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(ModelError, match="use fewer"):
        heads_of_ranks(4, 2, 5)


def test_parts_are_disjoint_cover_everything_and_differ_by_one_at_most():
    parts = [part_of(10, rank, 4) for rank in range(4)]
    assert [index for part in parts for index in part] == list(range(10))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_quantised_weights_are_divided_after_decoding():
    model = bound_model(build_tiny("llama", torch.float32), "llama", torch.float32)
    name = "model.layers.0.mlp.gate_proj.weight"
    data = torch.randn(96, 64).to(torch.float8_e4m3fn)
    quantised = StoredTensor(data, (96, 64), "fp8-block", torch.rand(3, 2), (32, 32))
    parts = [TensorParallelShard(model, rank, 2).shard({name: quantised})[name] for rank in range(2)]
    assert all(part.layout == "plain" and part.shape == (48, 64) for part in parts)
    assert torch.equal(torch.cat([part.data for part in parts]), dequantize(quantised, torch.float32))


def test_a_family_whose_plan_has_no_attention_is_refused():
    from transformers import GraniteMoeConfig

    config = GraniteMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = CausalModel.from_config("granitemoe", config, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError, match="no tensor-parallel plan for 'self_attn'"):
        TensorParallelShard(model, 0, 2)
