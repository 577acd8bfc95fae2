import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.planner.configuration import device_bytes
from hpcgen.planner.errors import PlanError
from hpcgen.planner.search import Memory, choose, fits
from tests.planner.shapes import deepseek, llama, long_tailed, machine, qwen3_moe


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([llama, qwen3_moe]),
    st.sampled_from(["a100x1", "h100x4", "h20x8", "mi300xx16"]),
    st.floats(4e9, 2e11),
    st.floats(8e10, 2e12),
    st.integers(1, 5000),
)
def test_no_choice_is_over_a_memory_limit(model, cluster, device, host, count):
    costs, hardware = machine(model(), cluster)
    memory = Memory(device, host)
    workload = long_tailed(count)
    try:
        choice = choose(costs, hardware.devices, hardware.devices_per_node, memory, workload)
    except PlanError:
        return
    assert fits(choice.configuration, costs, memory)


def test_more_device_memory_never_makes_the_estimate_worse_by_much():
    costs, _ = machine(qwen3_moe(), "a100x1")
    workload = long_tailed(800)
    seconds = [choose(costs, 1, 8, Memory(size, 1e12), workload).estimate.seconds for size in (8e9, 24e9, 80e9)]
    assert all(later <= 1.1 * earlier for earlier, later in itertools.pairwise(seconds))
    assert seconds[-1] < 0.5 * seconds[0]


def test_a_model_that_fits_keeps_all_layers_resident():
    costs, hardware = machine(deepseek(), "h200x8")
    choice = choose(costs, 8, 8, Memory.of(hardware), long_tailed(2000))
    assert choice.configuration.decode.resident_layers == 61
    assert choice.configuration.decode.ring_slots == 0


def test_a_model_larger_than_the_device_is_streamed():
    costs, _ = machine(qwen3_moe(), "a100x1")
    choice = choose(costs, 1, 8, Memory(16e9, 1e12), long_tailed(2000))
    assert choice.configuration.prefill.ring_slots >= 2
    assert choice.configuration.prefill.resident_layers < 48
    assert sum(device_bytes(costs.shape, choice.configuration.decode, 1).values()) <= 16e9


def test_a_model_larger_than_the_host_is_refused_with_both_sizes():
    costs, _ = machine(deepseek(), "h20x8")
    with pytest.raises(PlanError, match=r"672\.9 GB of parameters.*500\.0 GB of host memory"):
        choose(costs, 8, 8, Memory(80e9, 500e9), long_tailed(10))


def test_a_device_too_small_for_a_ring_is_refused():
    costs, _ = machine(deepseek(), "h20x8")
    with pytest.raises(PlanError, match="ring of two layers"):
        choose(costs, 8, 8, Memory(10e9, 2e12), long_tailed(10))


def test_the_smallest_wave_that_is_fast_enough_is_chosen():
    costs, _ = machine(llama(), "h100x1")
    choice = choose(costs, 1, 8, Memory(70e9, 1e12), long_tailed(5000))
    assert choice.configuration.prefill.expert_batch < 2**18


def test_in_place_there_is_no_limit_but_the_host():
    costs, _ = machine(llama(), "cpux1")
    choice = choose(dataclasses.replace(costs, streamed=False), 1, 1, Memory(None, 20e9), long_tailed(100))
    assert choice.configuration.in_place
    assert choice.configuration.limits(costs.shape).device_pages is None
