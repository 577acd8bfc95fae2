"""The command `hpcgen doctor`."""

import argparse
from pathlib import Path


def add_doctor_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="look for what commonly breaks on a cluster",
        description="Check this machine, its GPUs, the file system of run directories and Slurm, and say what to do "
        "about each finding. Run it where jobs run: srun -N 2 hpcgen doctor DIR.",
    )
    parser.add_argument(
        "directory", type=Path, nargs="?", default=Path(), metavar="DIR", help="where runs will write (default: here)"
    )
    parser.set_defaults(call=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from hpcgen.jobs.doctor import checks, exit_code, headline, render

    found = checks(arguments.directory)
    print(headline(arguments.directory))
    print(render(found))
    return exit_code(found)
