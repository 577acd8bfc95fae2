import os
import subprocess
from pathlib import Path

import pytest

BIND = Path(__file__).parents[2] / "launch" / "bind.sh"
REPORT = 'echo "$CUDA_VISIBLE_DEVICES|$UCX_NET_DEVICES|$CORES"'


@pytest.fixture
def node(tmp_path):
    """A node of 16 cores and four GPUs on two NUMA nodes, each with a network device; taskset only notes its cores."""
    sysfs = tmp_path / "sys"
    files = {"devices/system/cpu/online": "0-15"}
    for numa, cores in ((0, "0-7"), (1, "8-15")):
        files[f"devices/system/node/node{numa}/cpulist"] = cores
        files[f"class/infiniband/mlx5_{numa}/device/numa_node"] = str(numa)
    for gpu in range(4):
        files[f"bus/pci/devices/0000:{gpu}a:00.0/numa_node"] = str(gpu // 2)
    for name, text in files.items():
        (sysfs / name).parent.mkdir(parents=True, exist_ok=True)
        (sysfs / name).write_text(f"{text}\n")
    (tmp_path / "status").write_text("Cpus_allowed_list:\t0-15\n")
    clients = tmp_path / "bin"
    clients.mkdir()
    stand_ins = {
        "nvidia-smi": 'case $* in *index*) seq 0 3 ;; *) echo "00000000:${3##*=}A:00.0" ;; esac',
        "taskset": 'export CORES=$2; shift 2; exec "$@"',
    }
    for name, body in stand_ins.items():
        (clients / name).write_text(f"#!/bin/sh\n{body}\n")
        (clients / name).chmod(0o755)
    return tmp_path


def bind(node, **environment):
    """(GPUs, network devices, cores) of a rank that is started through bind.sh."""
    clean = {"PATH": f"{node}/bin:{os.environ['PATH']}", "BIND_SYSFS": f"{node}/sys", "BIND_STATUS": f"{node}/status"}
    done = subprocess.run(
        [BIND, "sh", "-c", REPORT], env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    gpus, network, cores = done.stdout.strip().split("|")
    return gpus, network, cores


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("rank_name", "size_name", "size"),
    [
        ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "4"),
    ],
)
def test_each_rank_has_one_gpu_and_the_cores_and_network_near_it(node, rank, rank_name, size_name, size):
    gpus, network, cores = bind(node, **{rank_name: str(rank), size_name: size})
    assert gpus == str(rank)
    assert network == f"mlx5_{rank // 2}:1"
    first = 4 * rank
    assert cores == ",".join(map(str, range(first, first + 4)))


def test_gpus_that_the_launcher_gave_are_divided(node):
    gpus = [bind(node, SLURM_LOCALID=str(r), SLURM_TASKS_PER_NODE="2", CUDA_VISIBLE_DEVICES="1,3")[0] for r in (0, 1)]
    assert gpus == ["1", "3"]


def test_one_gpu_that_the_launcher_gave_is_kept(node):
    assert bind(node, SLURM_LOCALID="3", SLURM_TASKS_PER_NODE="4", CUDA_VISIBLE_DEVICES="2")[0] == "2"


def test_cores_that_the_launcher_gave_are_kept(node):
    (node / "status").write_text("Cpus_allowed_list:\t4-7\n")
    assert bind(node, SLURM_LOCALID="1", SLURM_TASKS_PER_NODE="4")[2] == ""


def test_a_network_device_that_the_user_chose_is_kept(node):
    assert bind(node, SLURM_LOCALID="0", SLURM_TASKS_PER_NODE="4", UCX_NET_DEVICES="eth0")[1] == "eth0"


def test_a_node_without_gpus_divides_its_cores(node):
    (node / "bin" / "nvidia-smi").unlink()
    shares = [bind(node, SLURM_LOCALID=str(rank), SLURM_TASKS_PER_NODE="2")[2] for rank in (0, 1)]
    assert shares == [",".join(map(str, range(8))), ",".join(map(str, range(8, 16)))]


def test_a_rank_alone_has_everything(node):
    (node / "bin" / "nvidia-smi").unlink()
    assert bind(node) == ("", "", "")


def test_more_ranks_than_cores_are_not_bound(node):
    (node / "bin" / "nvidia-smi").unlink()
    assert bind(node, SLURM_LOCALID="5", SLURM_TASKS_PER_NODE="32")[2] == ""


def test_the_status_of_the_command_is_kept(node):
    assert subprocess.run([BIND, "sh", "-c", "exit 75"], check=False).returncode == 75
