import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.planner.outcome import Failure, Outcome, Preemption
from hpcgen.planner.search import Memory, choose
from hpcgen.planner.simulator import Simulation
from hpcgen.planner.workload import Workload
from tests.planner.shapes import llama, long_tailed, machine, qwen3_moe


def simulate(cluster: str, workload: Workload, memory: Memory | None = None, **options) -> Outcome:
    costs, hardware = machine(qwen3_moe(), cluster)
    memory = memory or Memory.of(hardware)
    choice = choose(costs, hardware.devices, hardware.devices_per_node, memory, workload)
    return Simulation(costs, choice.configuration, workload, **options).run()


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["h100x1", "h100x4", "h20x16"]),
    st.integers(1, 300),
    st.floats(2e10, 8e10),
    st.lists(st.tuples(st.floats(0, 60), st.integers(0, 15), st.booleans()), max_size=4),
)
def test_every_sequence_finishes_once_and_no_rank_is_busier_than_the_clock(cluster, count, device, failures):
    workload = long_tailed(count)
    deaths = [Failure(seconds, rank, lost) for seconds, rank, lost in failures if rank < int(cluster.split("x")[-1])]
    outcome = simulate(cluster, workload, Memory(device, 2e12), failures=deaths)
    assert not np.isnan(outcome.finish).any()
    assert (outcome.finish > 0).all()
    assert outcome.finish.max() <= outcome.seconds + 1e-6
    assert (outcome.busy <= outcome.seconds + 1e-6).all()
    assert sum(outcome.phase_seconds.values()) <= outcome.seconds + 1e-6


def test_tokens_are_conserved():
    workload = long_tailed(200)
    outcome = simulate("h100x4", workload)
    assert outcome.prefilled_tokens == workload.prompt_tokens
    assert outcome.decoded_tokens == workload.output_tokens - len(workload)  # one comes with each prefill


def test_a_sequence_that_can_never_fit_is_left_out_alone():
    workload = long_tailed(20)
    costs, hardware = machine(qwen3_moe(), "h100x1")
    choice = choose(costs, 1, 8, Memory.of(hardware), workload)
    most = workload.most.copy()
    most[7] = 10**9
    outcome = Simulation(costs, choice.configuration, Workload(workload.prompts, workload.outputs, most)).run()
    assert np.isnan(outcome.finish).nonzero()[0].tolist() == [7]


def test_a_failure_costs_time_and_loses_no_sequence():
    workload = long_tailed(400)
    whole = simulate("h20x16", workload)
    broken = simulate("h20x16", workload, failures=[Failure(whole.seconds / 3, 2), Failure(whole.seconds / 2, 9, True)])
    assert broken.seconds > whole.seconds
    assert not np.isnan(broken.finish).any()


def test_a_lost_node_prefills_its_sequences_again():
    workload = long_tailed(400)
    broken = simulate("h20x16", workload, failures=[Failure(2.0, 9, True)])
    assert broken.prefilled_tokens > workload.prompt_tokens


def test_a_preempted_instance_comes_back_with_its_tokens_and_its_checkpointed_kv():
    workload = long_tailed(400)
    whole = simulate("h20x16", workload)
    stop = Preemption(whole.seconds / 2, 100.0)
    back = simulate("h20x16", workload, preemptions=[stop])
    # The pause, and little else: what comes back is spread over the ranks anew, for better or worse.
    assert 0.9 * whole.seconds + 100 <= back.seconds < whole.seconds + 200
    assert not np.isnan(back.finish).any()
    assert back.prefilled_tokens == workload.prompt_tokens


def test_without_grace_the_tokens_survive_and_the_kv_is_computed_again():
    workload = long_tailed(400)
    whole = simulate("h20x16", workload)
    back = simulate("h20x16", workload, preemptions=[Preemption(whole.seconds / 2, 100.0, grace=0.0)])
    assert back.prefilled_tokens > workload.prompt_tokens
    assert back.decoded_tokens == whole.decoded_tokens
    assert not np.isnan(back.finish).any()


def test_twice_the_ranks_are_faster_but_not_more_than_twice():
    workload = long_tailed(4000)
    one, two = simulate("h100x8", workload), simulate("h100x16", workload)
    assert one.seconds / 2.2 < two.seconds < one.seconds


def test_the_timeline_of_a_rank_has_no_overlaps():
    outcome = simulate("h100x4", long_tailed(300))
    for rank in range(4):
        spans = [span for span in outcome.spans if span.rank == rank]
        assert spans
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(spans))


def test_the_policy_starves_nobody_at_a_thousand_ranks_with_failures():
    costs, hardware = machine(llama(), "h100x1024")
    workload = long_tailed(20_000, prompt=100, output=50)
    choice = choose(costs, 1024, 8, Memory.of(hardware), workload)
    failures = [Failure(0.2 + 0.1 * index, 50 * index + 3, index % 3 == 0) for index in range(12)]
    outcome = Simulation(costs, choice.configuration, workload, failures=failures).run()
    assert not np.isnan(outcome.finish).any()
    assert outcome.decisions < 500


def test_the_estimate_is_near_the_simulation():
    costs, hardware = machine(qwen3_moe(), "h100x8")
    workload = long_tailed(6000)
    choice = choose(costs, 8, 8, Memory.of(hardware), workload)
    outcome = Simulation(costs, choice.configuration, workload).run()
    assert choice.estimate.seconds == pytest.approx(outcome.seconds, rel=0.3)
