import dataclasses
import os
import time
from pathlib import Path

import pytest
import torch

from hpcgen.cluster.world import World
from hpcgen.planner.errors import PlanError
from hpcgen.planner.machine import costs_here, device_kind, machine_of, quick_measurement
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.profile_file import KernelFit, LinkFit, Profile
from hpcgen.planner.profile_store import default_file, find_profile
from tests.planner.shapes import llama, qwen3_moe

CPU = torch.device("cpu")


def profile(shape: ModelShape, machine: dict, ranks: int = 1, rate: float = 1e11) -> Profile:
    kernels = ("linear", "prefill_attention", "decode_attention") + (("experts",) if shape.experts else ())
    return Profile(
        machine=machine | {"ranks": ranks},
        model=f"/models/{shape.name}",
        shape=dataclasses.asdict(shape),
        host_memory=1e10,
        device_memory=None,
        fits={name: KernelFit(1e-6, rate, 1e10, 0.05, 0.1, 9) for name in kernels},
        links={name: LinkFit(1e10, 1e-6) for name in ("host", "back", "disk", "local", "remote", "window")},
        layer_fixed=1e-4,
    )


def kept(cache: Path, *profiles: Profile) -> Path:
    for one in profiles:
        one.write(default_file(cache, one))
    return cache


def test_a_device_is_known_by_its_name():
    assert device_kind("NVIDIA H200") == "h200"
    assert device_kind("NVIDIA H20") == "h20"
    assert device_kind("NVIDIA A100-SXM4-80GB") == "a100"
    assert device_kind("AMD Instinct MI300X") == "mi300x"
    assert device_kind("AMD EPYC") is None


def test_without_a_profile_the_machine_is_measured_in_a_moment(tmp_path):
    begin = time.process_time()
    costs, source = costs_here(tmp_path, machine_of(World(), CPU), llama(), CPU, torch.float32)
    assert time.process_time() - begin < 5
    assert "quick measurement" in source
    assert 1e8 < costs.linear.flops_per_second < 1e14 and costs.layer_fixed > 0


def test_a_gpu_without_a_profile_is_known_by_its_data_sheet(tmp_path):
    machine = machine_of(World(), CPU) | {"device": "NVIDIA H20"}
    assert costs_here(tmp_path, machine, llama(), CPU, torch.float32)[1] == "H20 data sheet"


def test_a_profile_of_this_machine_is_found_and_one_of_another_is_not(tmp_path):
    here = machine_of(World(), CPU)
    cache = kept(tmp_path, profile(llama(), here))
    assert find_profile(cache, here, llama()) is not None
    assert find_profile(cache, here | {"device": "another"}, llama()) is None
    assert find_profile(cache, here | {"threads": here["threads"] + 1}, llama()) is None
    assert find_profile(cache, here, qwen3_moe()) is None
    assert "profile of 20" in costs_here(cache, here, llama(), CPU, torch.bfloat16)[1]


def test_the_profile_of_the_model_itself_comes_before_one_of_as_many_ranks(tmp_path):
    here = machine_of(World(), CPU)
    other = dataclasses.replace(llama(), name="other", layers=3)
    cache = kept(tmp_path, profile(other, here, 2, 2e11), profile(llama(), here, 1, 1e11))
    found = find_profile(cache, here | {"ranks": 2}, llama().named("moved"))
    assert found is not None and found.shape["name"] == "llama"
    found = find_profile(cache, here | {"ranks": 2}, dataclasses.replace(llama(), layers=5))
    assert found is not None and found.ranks == 2


def test_a_damaged_profile_is_passed_over(tmp_path):
    here = machine_of(World(), CPU)
    cache = kept(tmp_path, profile(llama(), here))
    (cache / "profiles" / "broken.json").write_text("{")
    assert find_profile(cache, here, llama()) is not None


def test_more_ranks_than_cores_are_slower_by_as_much_as_they_are_too_many():
    measured = profile(llama(), machine_of(World(), CPU) | {"threads": 1, "cores": 2})
    alone, two, four = (measured.costs(llama(), ranks) for ranks in (1, 2, 4))
    assert two.linear == alone.linear
    assert four.linear.flops_per_second == pytest.approx(alone.linear.flops_per_second / 2)
    assert four.layer_fixed == pytest.approx(2 * alone.layer_fixed)
    assert four.ranks_a_core == 2
    crowded = profile(llama(), machine_of(World(), CPU) | {"threads": 1, "cores": 2}, ranks=4)
    assert crowded.costs(llama(), 4).linear == alone.linear  # measured so


def test_a_quick_measurement_knows_the_type_it_measured():
    measured = quick_measurement(llama(), CPU, torch.float32)
    assert measured.peak_flops("float32") > 1e8 and measured.memory_bandwidth > 1e8


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_profile_that_cannot_be_written_is_a_message(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PlanError, match="cannot be written"):
        profile(llama(), machine_of(World(), CPU)).write(tmp_path / "sub" / "profile.json")
