import dataclasses

import pytest

from hpcgen.planner.configuration import PhaseConfiguration
from hpcgen.planner.hardware import Link
from hpcgen.planner.sweep import COMPUTE, FETCH, NETWORK, decode_sweep, prefill_sweep
from tests.planner.shapes import deepseek, llama, machine, qwen3_moe


def test_with_all_resident_nothing_is_fetched():
    costs, _ = machine(llama(), "h100x1")
    sweep = prefill_sweep(costs, PhaseConfiguration(2048, 8192, 16, 0), 8192, 512)
    assert FETCH not in sweep.busy()
    assert sweep.limit() == COMPUTE


def test_a_sweep_is_never_shorter_than_its_busiest_resource():
    costs, _ = machine(qwen3_moe(), "h100x8")
    for resident in (0, 11, 24, 48):
        slots = 2 if resident < 48 else 0
        phase = PhaseConfiguration(64, 64, resident, slots)
        sweep = decode_sweep(costs, phase, 8, 64, 64 * 500, 512)
        assert sweep.seconds >= max(sweep.busy().values()) - 1e-12


def test_streaming_is_hidden_behind_enough_tokens():
    costs, _ = machine(qwen3_moe(), "h100x1")
    resident = PhaseConfiguration(8192, 2**17, 48, 0)
    streamed = PhaseConfiguration(8192, 2**17, 0, 2)
    few, many = 2048, 2**17
    assert prefill_sweep(costs, streamed, few, 512).seconds > 3 * prefill_sweep(costs, resident, few, 512).seconds
    assert prefill_sweep(costs, streamed, many, 512).seconds < 1.05 * prefill_sweep(costs, resident, many, 512).seconds


def test_streaming_a_step_takes_as_long_as_its_parameters_take_to_come():
    costs, _ = machine(llama(), "h100x1")
    costs = dataclasses.replace(costs, host=Link(1e9))
    sweep = decode_sweep(costs, PhaseConfiguration(8, 8, 0, 2), 1, 8, 800, 8)
    bytes_of_layers = 16 * (costs.shape.attention_bytes + costs.shape.dense_parameters * 2)
    assert sweep.seconds == pytest.approx(bytes_of_layers / 1e9, rel=0.02)
    assert sweep.limit() == FETCH


def test_more_resident_layers_never_slow_a_step():
    costs, _ = machine(deepseek(), "h20x8")
    seconds = [
        decode_sweep(costs, PhaseConfiguration(64, 64, resident, min(2, 61 - resident)), 8, 64, 64000, 512).seconds
        for resident in (0, 20, 40, 61)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_microbatches_hide_the_dispatch_where_it_overlaps():
    costs = dataclasses.replace(machine(deepseek(), "h20x16")[0], overlaps_exchange=True)
    whole = decode_sweep(costs, PhaseConfiguration(512, 512, 61, 0), 16, 512, 512 * 500, 8192)
    parts = decode_sweep(costs, PhaseConfiguration(128, 512, 61, 0), 16, 512, 512 * 500, 8192)
    assert parts.critical()["dispatch"] < whole.critical()["dispatch"]
    assert whole.busy()[NETWORK] > 0


def test_one_rank_exchanges_nothing():
    costs, _ = machine(qwen3_moe(), "h100x1")
    assert NETWORK not in decode_sweep(costs, PhaseConfiguration(64, 64, 48, 0), 1, 64, 6400, 64).busy()
