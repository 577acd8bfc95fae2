import json

import pytest

from hpcgen.planner.defaults import MachineMemory, device_kind, plan_run, stored
from hpcgen.planner.errors import PlanError
from tests.planner.shapes import LLAMA


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_run_on_a_cpu_is_planned_in_place(model):
    choice = plan_run(model, "cpu", MachineMemory(None, 8e9))
    assert choice.configuration.in_place
    assert choice.configuration.host_pages == int(8e9 // (64 * 32768))


def test_a_run_with_a_budget_streams_what_does_not_fit(model):
    choice = plan_run(model, "cpu", MachineMemory(1.7e9, 8e9))
    assert choice.configuration.prefill.ring_slots >= 2


def test_the_requests_decide_the_batch(model, tmp_path):
    requests = tmp_path / "requests.jsonl"
    requests.write_text("\n".join(json.dumps({"body": {"prompt": "x" * 40, "max_tokens": 5}}) for _ in range(4)))
    few = plan_run(model, "h100", MachineMemory(70e9, 1e12), requests=requests)
    many = plan_run(model, "h100", MachineMemory(70e9, 1e12))
    assert few.configuration.decode.expert_batch < many.configuration.decode.expert_batch


def test_the_choice_is_stored_as_plain_values(model):
    choice = plan_run(model, "h100", MachineMemory(70e9, 1e12), ranks=8, ranks_per_node=8)
    assert json.loads(json.dumps(stored(choice, "h100")))["ranks"] == 8


def test_a_device_is_known_by_its_name():
    assert device_kind("NVIDIA H200") == "h200"
    assert device_kind("NVIDIA H20") == "h20"
    assert device_kind("NVIDIA A100-SXM4-80GB") == "a100"
    assert device_kind("AMD EPYC") == "cpu"


def test_a_profile_that_is_none_is_refused(model, tmp_path):
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(PlanError, match="make one with `hpcgen profile`"):
        plan_run(model, tmp_path / "profile.json", MachineMemory(None, 8e9))
