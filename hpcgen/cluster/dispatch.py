"""Dispatch and combine of tokens between ranks by MPI's `Alltoallv`, for experts on CPUs.

A token goes once to each rank that has one of its experts, with the numbers and weights of all of them; what comes
back are that rank's sums, added up in fp32.

T tokens here, S tokens that came, K experts a token, D hidden, R ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hpcgen.cluster.waiting import wait
from hpcgen.kernels.dispatch.interface import Dispatched, expert_range

if TYPE_CHECKING:
    from mpi4py import MPI


class _Route(NamedTuple):
    """Which rows went where, to bring the results back the same way."""

    tokens: torch.Tensor
    """int64: token of each row that was sent, rank after rank."""
    sent: np.ndarray
    """int64 [R]: rows to each rank."""
    received: np.ndarray
    """int64 [R]: rows from each rank."""
    total: int
    """T."""


class AlltoallvDispatcher:
    """Collective over `comm`, whose ranks own the `experts` by `expert_range`. Tokens may be none."""

    name = "alltoallv"

    def __init__(self, comm: MPI.Intracomm, experts: int) -> None:
        from mpi4py import MPI

        self._comm, self._byte = comm, MPI.BYTE
        owner = np.zeros(experts, dtype=np.int64)
        for rank in range(comm.size):
            first, count = expert_range(rank, comm.size, experts)
            owner[first : first + count] = rank
        self._owner_E = torch.from_numpy(owner)

    def dispatch(self, hidden: torch.Tensor, top_index: torch.Tensor, top_weight: torch.Tensor) -> Dispatched:
        count, width = hidden.shape
        slots = top_index.shape[1]
        destination_TR = torch.zeros(count, self._comm.size, dtype=torch.bool)
        destination_TR.scatter_(1, self._owner_E[top_index.cpu()], True)
        rank, tokens = destination_TR.T.nonzero(as_tuple=True)
        sent = np.bincount(rank.numpy(), minlength=self._comm.size)
        received = np.empty_like(sent)
        wait(self._comm.Ialltoall(sent, received))
        # One row is the token's bytes: hidden, expert numbers, weights.
        rows = torch.cat(
            [
                _bytes(hidden.cpu()[tokens]),
                _bytes(top_index.cpu()[tokens].int()),
                _bytes(top_weight.cpu()[tokens].float()),
            ],
            1,
        )
        came = self._exchange(rows, sent, received)
        hidden_bytes = width * hidden.element_size()
        parts = came.split([hidden_bytes, 4 * slots, 4 * slots], 1)
        return Dispatched(
            _typed(parts[0], hidden.dtype).to(hidden.device),
            _typed(parts[1], torch.int32).long().to(hidden.device),
            _typed(parts[2], torch.float32).to(hidden.device),
            _Route(tokens, sent, received, count),
        )

    def combine(self, out: torch.Tensor, handle: _Route) -> torch.Tensor:
        back = self._exchange(_bytes(out.cpu()), handle.received, handle.sent)
        sums = torch.zeros(handle.total, out.shape[1], dtype=torch.float32)
        sums.index_add_(0, handle.tokens, _typed(back, out.dtype).float())
        return sums.to(out.device, out.dtype)

    def _exchange(self, rows: torch.Tensor, sent: np.ndarray, received: np.ndarray) -> torch.Tensor:
        """uint8 [rows, bytes], `sent` of them to each rank -> uint8 [sum(received), bytes]."""
        width = rows.shape[1]
        came = torch.empty(int(received.sum()), width, dtype=torch.uint8)
        # Counts are 32-bit in older MPIs: a row is one element.
        row = self._byte.Create_contiguous(width).Commit()
        try:
            wait(self._comm.Ialltoallv([rows.numpy(), (sent, None), row], [came.numpy(), (received, None), row]))
        finally:
            row.Free()
        return came


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """[n, m] -> uint8 [n, bytes of a row]."""
    return rows.contiguous().view(torch.uint8) if len(rows) else rows.new_empty(0, _row_bytes(rows), dtype=torch.uint8)


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()


def _typed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [n, bytes] -> [n, m]. Copies, for a column of a wider row is not aligned."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)
