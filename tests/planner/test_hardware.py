import pytest

from hpcgen.planner.errors import PlanError
from hpcgen.planner.hardware import CLUSTERS, Link, load_cluster, read_cluster


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_cluster_file_is_read_and_names_sources(file):
    hardware = read_cluster(file)
    assert hardware.memory > 1e9
    assert hardware.peak_flops("float8") >= hardware.peak_flops("bfloat16")
    assert "data sheet" in file.read_text() or "Guide" in file.read_text()


def test_a_name_gives_kind_and_devices():
    hardware = load_cluster("h20x16")
    assert (hardware.name, hardware.devices, hardware.nodes) == ("H20", 16, 2)
    assert hardware.node_of_rank == (0,) * 8 + (1,) * 8


@pytest.mark.parametrize("name", ["h21x8", "h20x0", "x", "h20:x", "/nowhere.yaml:2"])
def test_an_unknown_cluster_is_refused_with_the_known_ones(name):
    with pytest.raises(PlanError, match="h100, h20, h200"):
        load_cluster(name)


def test_a_file_of_ones_own_is_taken(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text((CLUSTERS / "a100.yaml").read_text())
    assert load_cluster(f"{file}:4").devices == 4


def test_a_broken_file_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: X\ndevice: {memory: much}\n")
    with pytest.raises(PlanError, match="not a cluster description"):
        load_cluster(str(file))


def test_a_link_takes_its_latency_and_no_time_for_nothing():
    assert Link(100.0, 1.0).seconds(200.0) == 3.0
    assert Link(100.0, 1.0).seconds(0) == 0.0
