import pytest

from hpcgen.cluster.launcher import Launch, check_world_size, launch_of


@pytest.mark.parametrize(
    ("environment", "size", "rank"),
    [
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, 4, 2),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}, 3, 1),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"}, 8, 7),
    ],
)
def test_the_launcher_is_known_by_its_variables(environment, size, rank) -> None:
    assert launch_of(environment)[:2] == (size, rank)


def test_a_shell_and_the_script_of_an_sbatch_job_have_no_launcher() -> None:
    assert launch_of({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None


def test_the_variables_of_slurm_are_not_taken_for_those_of_the_mpirun_that_it_started() -> None:
    launch = launch_of({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "PMI_SIZE": "8", "PMI_RANK": "6"})
    assert launch[:2] == (8, 6)


def test_a_world_of_another_size_than_the_launcher_says_is_refused_with_the_remedy() -> None:
    assert check_world_size(Launch(4, 0, "srun"), 4, "MPICH") is None
    problem = check_world_size(Launch(4, 0, "srun"), 1, "MPICH 5")
    assert "4 ranks" in problem and "MPICH 5" in problem and "--mpi=pmi2" in problem
