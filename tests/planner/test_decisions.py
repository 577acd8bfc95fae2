import dataclasses

import pytest

from hpcgen.planner.deadline import most_within
from hpcgen.planner.decisions import Source, cheapest_source, recompute_seconds_per_byte, refill_share
from hpcgen.planner.hardware import Link
from hpcgen.planner.saturation import instance_sizes, least_ranks, saturated
from hpcgen.planner.search import Memory
from tests.planner.shapes import deepseek, llama, long_tailed, machine, qwen3_moe


def test_kv_is_migrated_over_a_fast_network_and_recomputed_over_a_slow_one():
    costs, _ = machine(deepseek(), "h100x16")
    assert cheapest_source(costs, 4096, migrate=True, load=False) is Source.MIGRATE
    slow = dataclasses.replace(costs, remote=Link(1e6))
    assert cheapest_source(slow, 4096, migrate=True, load=False) is Source.RECOMPUTE
    assert cheapest_source(costs, 4096, migrate=False, load=False) is Source.RECOMPUTE


def test_a_checkpoint_on_a_fast_disk_is_loaded():
    costs, _ = machine(llama(), "h100x1")
    fast = dataclasses.replace(costs, disk=Link(1e13))
    assert cheapest_source(fast, 4096, migrate=True, load=True) is Source.LOAD


def test_the_share_to_refill_below_is_the_cheapest_of_all():
    switch, step, output = 3.0, 0.05, 800.0

    def cost(share: float) -> float:
        return switch / (1 - share) + step * output * (1 - share) / 2

    share = refill_share(switch, step, output)
    assert cost(share) == pytest.approx(min(cost(index / 1000) for index in range(999)), rel=1e-4)


def test_an_expensive_switch_waits_until_the_batch_is_empty():
    assert refill_share(1e6, 0.05, 800) == 0.0
    assert refill_share(0.0, 0.05, 800) == 1.0


def test_long_contexts_are_worth_more_in_a_checkpoint():
    costs, _ = machine(llama(), "h100x1")
    assert recompute_seconds_per_byte(costs, 32768) > recompute_seconds_per_byte(costs, 512)


def test_the_largest_batch_within_a_limit_is_found_to_a_percent():
    workload = long_tailed(100)
    found = most_within(1000.0, workload, lambda load: len(load) * 0.5, 10**6)
    assert 1980 <= found.sequences <= 2000
    assert found.seconds <= 1000.0


def test_no_sequence_within_too_short_a_limit():
    assert most_within(0.1, long_tailed(10), lambda load: 1.0, 1000).sequences == 0


def test_saturation_names_the_smallest_instance_that_is_as_good_as_any():
    costs, hardware = machine(qwen3_moe(), "h100x16")
    sizes = instance_sizes(costs, 8, Memory.of(hardware), long_tailed(2000), 16)
    best = saturated(sizes)
    assert [size.ranks for size in sizes] == [1, 2, 4, 8, 16]
    assert best.tokens_per_rank >= 0.98 * max(size.tokens_per_rank for size in sizes)
    assert all(size.tokens_per_rank < best.tokens_per_rank for size in sizes if size.ranks < best.ranks)


def test_the_fewest_ranks_that_can_run_a_model_are_found():
    costs, _ = machine(deepseek(), "h200x8")
    tight = Memory(26e9, 1.8e12)  # a ring of two whole layers does not fit, whatever the ranks: prefill needs it
    assert least_ranks(costs, 8, tight, long_tailed(50)) is None
    assert least_ranks(costs, 8, Memory(130e9, 1.8e12), long_tailed(50)) == 1


def test_a_model_too_large_for_one_rank_starts_at_more():
    costs, _ = machine(deepseek(), "h200x16")
    sizes = instance_sizes(costs, 8, Memory(130e9, 1.8e12), long_tailed(2000), 16)
    assert saturated(sizes).ranks == pytest.approx(16, abs=8)
