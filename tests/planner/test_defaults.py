import dataclasses
import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.planner.defaults import RunPlan, Situation, plan_run, predicted_by_data_sheet, restored, stored
from hpcgen.planner.errors import PlanError
from tests.planner.shapes import LLAMA, llama, long_tailed, machine

CPU = Situation("/model", "AMD EPYC", 1, 1, 1, 4096, None)


def plan(situation: Situation = CPU, cluster: str = "cpux1", count: int = 100, kv: float = 8e9) -> RunPlan:
    costs, _ = machine(llama(), cluster)
    return plan_run(costs, situation, kv, long_tailed(count))


def test_a_run_on_a_cpu_is_planned_in_place():
    found = plan()
    assert found.decode_kv_bytes is None and found.prefill_slots == 0 and not found.kv_streamed
    assert found.seconds > 0 and found.decode_seconds > 0


def test_a_run_with_a_budget_streams_what_does_not_fit():
    assert plan(dataclasses.replace(CPU, device_memory=1_700_000_000)).prefill_slots >= 2


def test_the_requests_decide_the_batch():
    situation = dataclasses.replace(CPU, device="NVIDIA H100", device_memory=70_000_000_000)
    few, many = (plan(situation, "h100x1", count, 1e12) for count in (4, 5000))
    assert few.decode_batch < many.decode_batch


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 20_000), st.sampled_from([None, 12_000_000_000]))
def test_what_the_user_decides_is_taken_as_it_is(attention: int, experts: int, device: int | None):
    situation = dataclasses.replace(CPU, device_memory=device, attention_batch=attention, expert_batch=experts)
    try:
        found = plan(situation)
    except PlanError:
        return
    assert found.expert_batch == found.decode_batch == experts
    assert found.attention_microbatch == found.decode_microbatch == min(attention, experts)


def test_a_plan_holds_again_only_in_an_equal_situation():
    found = plan()
    content = json.loads(json.dumps(stored(CPU, found, "profile")))
    assert restored(content, CPU) == found
    assert restored(content, dataclasses.replace(CPU, ranks=2)) is None
    assert restored(content, dataclasses.replace(CPU, expert_batch=64)) is None
    assert restored({"plan": {"of": "another version"}, "situation": dataclasses.asdict(CPU)}, CPU) is None


def test_a_submission_is_predicted_by_data_sheet(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps({"body": {"prompt": "x" * 400, "max_tokens": 50}}) for _ in range(30)))
    said = predicted_by_data_sheet(tmp_path, file, 30, "h100", 8)
    assert said is not None and "on 8 H100" in said
    assert predicted_by_data_sheet(tmp_path, file, 30, "nowhere", 8) is None


def test_nodes_migrate_unless_computing_again_is_sooner():
    costs, _ = machine(llama(), "h100x16")
    situation = dataclasses.replace(CPU, ranks=16, nodes=2, device_memory=70_000_000_000)
    assert plan_run(costs, situation, 1e12, long_tailed(500)).migrate
    slow = dataclasses.replace(costs, remote=dataclasses.replace(costs.remote, bandwidth=1e6))
    assert not plan_run(slow, situation, 1e12, long_tailed(500)).migrate


def test_ranks_partition_only_where_the_last_sequence_gains_by_it():
    costs, _ = machine(llama(), "h100x8")
    situation = dataclasses.replace(CPU, ranks=8, device_memory=70_000_000_000)
    assert plan_run(costs, situation, 1e12, long_tailed(500)).partition_below == 8
    slow = dataclasses.replace(costs, local=dataclasses.replace(costs.local, latency=0.1))
    assert plan_run(slow, situation, 1e12, long_tailed(500)).partition_below == 0
