import dataclasses

import numpy as np
import pytest

from hpcgen.planner.baselines import (
    DEPLOYED,
    EQUAL,
    IDEAL,
    Engine,
    continuous,
    layerwise_offload,
    on_demand,
    tuned_continuous,
)
from hpcgen.planner.errors import PlanError
from hpcgen.planner.search import Memory, choose
from hpcgen.planner.simulator import Simulation
from tests.planner.shapes import deepseek, llama, long_tailed, machine, qwen3_moe


def test_every_sequence_of_continuous_batching_finishes():
    costs, hardware = machine(qwen3_moe(), "h100x4")
    baseline = continuous(costs, Memory.of(hardware), 4, long_tailed(300), 64, 2048, False)
    assert (baseline.finish > 0).all()
    assert baseline.finish.max() == pytest.approx(baseline.seconds)
    assert baseline.largest_batch <= 64


def test_scarce_memory_makes_continuous_batching_recompute_but_finish():
    costs, _ = machine(llama(), "h100x1")
    baseline = continuous(costs, Memory(3.6e9, 1e12), 1, long_tailed(100), 64, 512, False)
    assert (baseline.finish > 0).all()
    assert baseline.largest_batch < 64


def test_the_tuned_baseline_is_at_least_as_fast_as_any_setting():
    costs, hardware = machine(qwen3_moe(), "h100x4")
    workload = long_tailed(300)
    best = tuned_continuous(costs, Memory.of(hardware), 4, workload)
    assert best.seconds <= continuous(costs, Memory.of(hardware), 4, workload, 256, 2048, False).seconds


def test_a_model_larger_than_the_devices_cannot_be_run_resident():
    costs, _ = machine(deepseek(), "h100x8")
    with pytest.raises(PlanError, match="does not fit 8 devices"):
        tuned_continuous(costs, Memory(70e9, 2e12), 8, long_tailed(10))


def test_each_assumption_in_favour_of_an_engine_makes_it_faster():
    costs, hardware = machine(deepseek(), "h20x16")
    workload = long_tailed(400, prompt=1000, output=200)

    def seconds(engine: Engine) -> float:
        return continuous(costs, Memory.of(hardware), 16, workload, 1024, 8192, False, engine).seconds

    equal = seconds(EQUAL)
    assert seconds(dataclasses.replace(EQUAL, mixes=False)) > equal
    assert seconds(dataclasses.replace(EQUAL, balances=True)) < equal
    assert seconds(dataclasses.replace(EQUAL, hides_exchange=True)) < equal
    assert seconds(IDEAL) < equal < seconds(DEPLOYED)


@pytest.mark.parametrize("baseline", [layerwise_offload, on_demand])
def test_offloading_systems_finish_all(baseline):
    costs, _ = machine(qwen3_moe(), "a100x1")
    found = baseline(costs, Memory(24e9, 5e11), 1, long_tailed(500))
    assert found.seconds > 0
    assert len(found.finish) == 500
    assert (np.diff(np.sort(found.finish)) >= 0).all()


def test_on_scarce_memory_module_batches_beat_model_batches():
    costs, _ = machine(qwen3_moe(), "a100x1")
    memory, workload = Memory(24e9, 5e11), long_tailed(2000)
    ours = Simulation(costs, choose(costs, 1, 8, memory, workload).configuration, workload).run()
    assert ours.seconds < layerwise_offload(costs, memory, 1, workload).seconds
