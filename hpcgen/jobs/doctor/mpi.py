"""MPI: which library there is, whether it and the launcher agree, and whether one rank can read another's memory."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcgen.cluster.launcher import Launch, launch_of
from hpcgen.cluster.world import World
from hpcgen.jobs.doctor.check import Check, Level

PULL_BYTES = 4 << 20
PULL_SECONDS = 20.0
"""A pull of so few bytes that takes longer hangs."""
_ASK = (
    "import json; from mpi4py import MPI; "
    "maps = open('/proc/self/maps').read().split(); "
    "path = next((word for word in maps if '/libmpi' in word), '?'); "
    "print(json.dumps([MPI.Get_library_version(), path, MPI.Query_thread() >= MPI.THREAD_MULTIPLE]))"
)
_INSTALL = (
    "pip install 'hpcgen[mpi]' (MPICH), or load the site's MPI, pip install mpi4py, and set MPI4PY_LIBMPI to its libmpi"
)
_OUTSIDE = "some sites' MPI works under their launcher only: run the doctor there, srun -n 2 hpcgen doctor DIR"


def mpi_library(environment: Mapping[str, str] = os.environ, python: str = sys.executable) -> list[Check]:
    """The library as a process without a launcher finds it; asked for in a process of its own, which it may end."""
    alone = {name: value for name, value in environment.items() if not name.startswith(("PMI_", "PMIX_", "OMPI_COMM"))}
    try:
        done = subprocess.run([python, "-c", _ASK], env=alone, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return [Check("MPI", Level.WARNING, "MPI_Init does not return here", _OUTSIDE)]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        if "No module named 'mpi4py'" in last:
            return [Check("MPI", Level.WARNING, "mpi4py is not installed: runs have one rank only", _INSTALL)]
        remedy = f"{_OUTSIDE}; where no MPI library was found: {_INSTALL}"
        return [Check("MPI", Level.WARNING, f"cannot be used here: {last}", remedy)]
    version, path, threads = json.loads(done.stdout.strip().splitlines()[-1])
    return [Check("MPI", Level.OK, f"{_first_line(version)} ({path})"), thread_level(threads)]


def thread_level(multiple: bool) -> Check:
    """MIGRATE waits in MPI on threads of its own."""
    if multiple:
        return Check("MPI threads", Level.OK, "any thread may call it (MPI_THREAD_MULTIPLE)")
    remedy = "use a library with thread support; until then sequences stay on the node that prefilled them"
    return Check("MPI threads", Level.WARNING, "it does not give MPI_THREAD_MULTIPLE, which MIGRATE needs", remedy)


def launcher(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The launcher of several ranks; None where there is none."""
    launch = launch_of(environment)
    return None if launch is None or launch.size == 1 else launch


def ranks(world: World) -> list[Check]:
    """What all ranks find together. Collective."""
    from mpi4py import MPI

    version = _first_line(MPI.Get_library_version())
    found = [Check("MPI", Level.OK, version), thread_level(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)]
    nodes = ", ".join(f"{host}: {world.node_of_rank.count(node)}" for node, host in enumerate(world.hosts))
    found.append(Check("launcher", Level.OK, f"it and MPI agree on {world.size} ranks ({nodes})"))
    shared = world.node_broadcast(sorted(os.sched_getaffinity(0)))
    if world.node is not None and world.node.size > 1:
        found.append(_binding(shared == sorted(os.sched_getaffinity(0)), world.node.size))
    found.append(pull(world))
    return found


def pull(world: World) -> Check:
    """Reads memory of the next rank by `Rget`, as MIGRATE does."""
    from mpi4py import MPI

    comm = world.comm
    assert comm is not None
    own, came = np.full(PULL_BYTES, comm.rank % 251, np.uint8), np.empty(PULL_BYTES, np.uint8)
    window = MPI.Win.Create(own, 1, comm=comm)
    window.Lock_all(MPI.MODE_NOCHECK)
    comm.Barrier()
    other = (comm.rank + 1) % comm.size
    start = time.monotonic()
    request = window.Rget([came, MPI.BYTE], other, (0, PULL_BYTES, MPI.BYTE))
    while not request.Test():
        if time.monotonic() - start > PULL_SECONDS:
            return Check(
                "one-sided", Level.ERROR, f"Rget of {PULL_BYTES >> 20} MiB from rank {other} hangs",
                "run with --no-migrate; or choose another transport: UCX_TLS=tcp,self,sm, FI_PROVIDER=tcp, or Open "
                "MPI's --mca osc ^ucx",
            )  # fmt: skip
    seconds = time.monotonic() - start
    right = bool((came == other % 251).all())
    comm.Barrier()
    window.Unlock_all()
    window.Free()
    if not right:
        return Check("one-sided", Level.ERROR, f"Rget from rank {other} gave wrong bytes", "run with --no-migrate")
    return Check("one-sided", Level.OK, f"Rget of {PULL_BYTES >> 20} MiB in {1000 * seconds:.1f} ms")


def _binding(same: bool, local: int) -> Check:
    if not same:
        return Check("binding", Level.OK, "ranks of this node have cores of their own")
    remedy = "hpcgen divides them; for GPUs and network devices too, put launch/bind.sh before the command"
    return Check("binding", Level.OK, f"the {local} ranks of this node have the same cores", remedy)


def gathered(world: World, found: list[Check]) -> list[Any] | None:
    """(rank, host, findings) of every rank, on rank 0. Collective."""
    assert world.comm is not None
    return world.comm.gather((world.rank, world.hosts[world.node_index], found))


def _first_line(version: str) -> str:
    return " ".join(version.split("\n")[0].replace("\0", "").split())
