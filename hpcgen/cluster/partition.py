"""PARTITION: the last sequence of a batch, decoded by all ranks at once by tensor parallelism.

Each rank keeps its shard, made when it is first needed (`shard_memory`), and its heads of the sequence's KV. The rank
that the sequence is active on samples; after each interval it has whole pages again, so that the next plan can be
anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcgen.cluster.shard_memory import ShardMemory
from hpcgen.engine.microbatch import attention_batch
from hpcgen.engine.sampling import sample
from hpcgen.engine.structured import StructuredOutput
from hpcgen.kernels.attention.interface import AttentionBackend
from hpcgen.memory.host_store import HostStore
from hpcgen.model.causal import CausalModel
from hpcgen.model.errors import ModelError
from hpcgen.model.forward_context import ForwardContext
from hpcgen.model.tensor_parallel import TensorParallelShard
from hpcgen.sequence import PAGE_TOKENS, Sequence, pages_for

if TYPE_CHECKING:
    from mpi4py import MPI

_NOBODY = (-1, -1)


def shard_of(model: CausalModel, rank: int, ranks: int) -> TensorParallelShard | None:
    """A rank's shard of a model; None where not every layer can be divided among so many ranks."""
    try:
        return TensorParallelShard(model, rank, ranks)
    except ModelError:
        return None


class PartitionedDecode:
    """Decode steps of one sequence over all ranks of `comm`. Collective."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        memory: ShardMemory,
        store: HostStore,
        attention: AttentionBackend,
        structured: StructuredOutput | None,
    ) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._memory = MPI, comm, memory
        self._store, self._attention, self._structured = store, attention, structured
        self._sums = False
        """Whether the shard adds up partial sums already."""
        self._holds = _NOBODY
        """(sequence, tokens of it) whose KV is in the memory's pages, on every rank."""

    def leave(self) -> None:
        """The device is needed for other things; between two calls of `decode`."""
        self._memory.close()
        self._holds = _NOBODY

    def decode(
        self, sequence: Sequence | None, steps: int, append: Callable[[Sequence, int], bool]
    ) -> tuple[int, bool]:
        """Up to `steps` tokens for the sequence that one rank gives; (steps done, whether `append` ended it)."""
        owner = self._comm.allreduce(-1 if sequence is None else self._comm.rank, op=self._mpi.MAX)
        if owner < 0:
            return 0, False  # it ended before this plan was made
        shard = self._open()
        start = (0, 0, 0) if sequence is None else (sequence.id, sequence.kv_length, sequence.output[-1])
        key, first, token = self._comm.bcast(start, root=owner)
        pages = self._memory.pages(pages_for(first + steps))
        if self._holds != (key, first):
            self._hand_out(shard, pages, sequence, owner, pages_for(first))
        kv_length, ended = first, False
        while kv_length < first + steps and not ended:
            logits = self._forward(shard, pages, token, kv_length, wanted=sequence is not None)
            kv_length += 1
            said = (0, False)
            if sequence is not None:
                sequence.kv_length = kv_length
                (token,) = sample(logits, [sequence], self._structured)
                said = token, append(sequence, token)
            token, ended = self._comm.bcast(said, root=owner)
        self._holds = _NOBODY if ended else (key, kv_length)
        if not ended:
            self._bring_back(shard, pages, sequence, owner, range(first // PAGE_TOKENS, pages_for(kv_length)))
        return kv_length - first, ended

    def _open(self) -> TensorParallelShard:
        shard = self._memory.open()
        if not self._sums:
            shard.sum_partials(self._sum)
            self._sums = True
        return shard

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        # MPI knows no bfloat16; sums in fp32 are what a rank alone would have.
        total = partial.float().cpu().contiguous()
        self._comm.Allreduce(self._mpi.IN_PLACE, total.numpy())
        return total.to(partial.device, partial.dtype)

    @torch.inference_mode()
    def _forward(
        self, shard: TensorParallelShard, pages: torch.Tensor, token: int, kv_length: int, wanted: bool
    ) -> torch.Tensor:
        """Logits [1, V] after `token` at position `kv_length`; [0, V] where none are wanted."""
        model, device = shard.model, shard.model.device
        table = np.arange(pages_for(kv_length + 1), dtype=np.int32)[None]
        batch = attention_batch(np.array([kv_length]), np.array([kv_length + 1]), table, device)
        self._attention.plan(batch)
        layers = shard.kv_layout.views(pages)
        hidden = self._memory.embed(token)
        rows = torch.zeros(1, dtype=torch.int64, device=device) if wanted else None
        return model.forward(hidden, ForwardContext(batch, self._attention, layers.__getitem__), rows)

    def _hand_out(
        self, shard: TensorParallelShard, pages: torch.Tensor, sequence: Sequence | None, owner: int, count: int
    ) -> None:
        """The owner's pages to every rank: its heads of them."""
        if sequence is None:
            own = torch.empty(count, shard.kv_layout.page_bytes, dtype=torch.uint8)
            self._comm.Recv(own.numpy(), owner)
        else:
            whole = self._store.pages[torch.tensor(sequence.pages[:count])]
            for rank in range(self._comm.size):
                if rank != owner:
                    theirs = TensorParallelShard(shard.model, rank, self._comm.size)
                    self._comm.Send(theirs.slice_pages(whole).contiguous().numpy(), rank)
            own = shard.slice_pages(whole)
        pages[:count] = own.to(pages.device)

    def _bring_back(
        self, shard: TensorParallelShard, pages: torch.Tensor, sequence: Sequence | None, owner: int, touched: range
    ) -> None:
        """The pages that grew, of all ranks, to the owner's host store."""
        own = pages[touched.start : touched.stop].cpu().contiguous()
        if sequence is None:
            if not shard.model.latent_attention:
                self._comm.Send(own.numpy(), owner)
            return
        parts = []
        for rank in range(self._comm.size):
            if rank != owner and not shard.model.latent_attention:
                layout = TensorParallelShard(shard.model, rank, self._comm.size).kv_layout
                theirs = torch.empty(len(touched), layout.page_bytes, dtype=torch.uint8)
                self._comm.Recv(theirs.numpy(), rank)
                parts.append(theirs)
            else:
                parts.append(own)
        whole = shard.merge_pages(parts)
        self._store.pages[torch.tensor(sequence.pages[touched.start : touched.stop])] = whole
