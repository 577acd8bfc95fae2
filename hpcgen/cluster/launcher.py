"""What the launcher (mpirun, srun) says of the ranks it started, read from the environment without MPI.

A launcher and an MPI library that do not speak the same PMI fail silently: every task becomes a world of size 1 and
computes the whole batch. So the launcher's count is compared with MPI's.
"""

from collections.abc import Mapping
from typing import NamedTuple

_SIZES = (
    # Slurm's variables come last: a launcher that uses srun to start its daemons leaves those of the daemons.
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI's mpirun"),
    ("PMI_SIZE", "PMI_RANK", "a launcher that speaks PMI"),
    ("PALS_SIZE", "PALS_RANKID", "PALS"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MVAPICH2's launcher"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
)


class Launch(NamedTuple):
    """A launcher's word on this process."""

    size: int
    rank: int
    launcher: str


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """What the launcher says; None where there is none, as in a shell or in the script of an sbatch job."""
    for size, rank, launcher in _SIZES:
        if environment.get(size, "").isdigit():
            return Launch(int(environment[size]), int(environment.get(rank, "0")), launcher)
    return None


def check_world_size(launch: Launch, size: int, library: str) -> str | None:
    """What is wrong where MPI's world has another size than the launcher says; None where they agree."""
    if launch.size == size:
        return None
    return (
        f"{launch.launcher} started {launch.size} ranks, but MPI ({library}) sees {size}: they do not speak the same "
        "PMI, and every rank would run the whole batch alone. Under srun choose what the library speaks (MPICH: "
        "--mpi=pmi2, Open MPI: --mpi=pmix); use the mpirun that came with the library, or point MPI4PY_LIBMPI at the "
        "site's. `hpcgen doctor` says what it finds."
    )


def outlives_ranks(environment: Mapping[str, str]) -> bool:
    """Whether the launcher leaves the other ranks alone when one dies: Open MPI's with `--with-ft ulfm`."""
    return environment.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "on")
