"""The command `hpcgen doctor`."""

import argparse
from pathlib import Path


def add_doctor_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="look for what commonly breaks on a cluster",
        description="Check this machine, its GPUs, the file system of run directories and Slurm, and say what to do "
        "about each finding; of MPI too, where it is started as runs are: srun -N 2 hpcgen doctor DIR.",
    )
    parser.add_argument(
        "directory", type=Path, nargs="?", default=Path(), metavar="DIR", help="where runs will write (default: here)"
    )
    parser.set_defaults(call=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from hpcgen.jobs.doctor import checks, exit_code, headline, render
    from hpcgen.jobs.doctor.mpi import launcher, mpi_library

    directory = arguments.directory
    if (launch := launcher()) is not None:
        return _doctor_of_ranks(directory, launch.rank)
    found = checks(directory, [mpi_library])
    print(headline(directory))
    print(render(found))
    return exit_code(found)


def _doctor_of_ranks(directory: Path, rank: int) -> int:
    """Started by mpirun or srun: each node's machine, and all ranks together; rank 0 says it."""
    from hpcgen.cluster.errors import ClusterError
    from hpcgen.cluster.world import open_world
    from hpcgen.jobs.doctor import Check, Level, checks, exit_code, headline, render
    from hpcgen.jobs.doctor.mpi import gathered, ranks

    try:
        with open_world() as world:
            machine, together = checks(directory) if world.is_leader else [], ranks(world)
            if not world.leads:
                together = [check for check in together if check.level in (Level.WARNING, Level.ERROR)]
            everything = gathered(world, machine + together)
            if everything is not None:
                print(headline(directory))
                for number, host, found in everything:
                    if found:
                        print(f"rank {number} on {host}:\n{render(found)}")
            return int(world.broadcast(everything and exit_code(check for *_, found in everything for check in found)))
    except ClusterError as error:
        if rank == 0:
            found = [*checks(directory), Check("launcher", Level.ERROR, "MPI and the launcher disagree", str(error))]
            print(headline(directory))
            print(render(found))
        return 1
