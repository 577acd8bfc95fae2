"""torch.distributed beside MPI, for libraries that want a process group: MPI says who is who and where the store is."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import distributed

from hpcgen.cluster.errors import ClusterError

if TYPE_CHECKING:
    from mpi4py import MPI


@contextmanager
def process_group(comm: MPI.Intracomm, device: torch.device) -> Iterator[distributed.ProcessGroup]:
    """The ranks of `comm` as the default process group, by NCCL on CUDA and Gloo elsewhere. Collective.

    Raises ClusterError, on every rank, where a rank cannot reach the store of rank 0.
    """
    cuda = device.type == "cuda"
    store = _meet(comm)
    distributed.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=comm.rank,
        world_size=comm.size,
        device_id=device if cuda else None,
    )
    group = distributed.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        distributed.destroy_process_group()


def _meet(comm: MPI.Intracomm) -> distributed.TCPStore:
    """A store at a free port of rank 0, which MPI tells the others, so that no address has to be configured."""
    host, store, problem = socket.gethostname(), None, None
    try:
        if comm.rank == 0:
            store = distributed.TCPStore(host, 0, comm.size, True, wait_for_workers=False)
    except (RuntimeError, ValueError, OSError) as error:
        problem = f"rank 0 cannot listen on {host}: {error}"
    address = comm.bcast((host, store.port) if store is not None else None)
    try:
        if store is None and address is not None:
            store = distributed.TCPStore(address[0], address[1], comm.size, False)
    except (RuntimeError, ValueError, OSError) as error:
        problem = f"rank {comm.rank} cannot reach {address[0]} by TCP: {error}"
    if problems := [each for each in comm.allgather(problem) if each]:
        raise ClusterError(f"torch.distributed cannot start: {problems[0]}")
    assert store is not None
    return store
