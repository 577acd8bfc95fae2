"""PARTITION: the last sequence of a batch, decoded by all ranks at once by tensor parallelism.

Each rank keeps a second copy of the definition bound to its shard, made when it is first needed, and its heads of the
sequence's KV. The rank that the sequence is active on samples; after each interval it has whole pages again, so that
the next plan can be anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcgen.engine.microbatch import attention_batch
from hpcgen.engine.sampling import sample
from hpcgen.engine.structured import StructuredOutput
from hpcgen.kernels.attention.interface import AttentionBackend
from hpcgen.memory.host_store import HostStore
from hpcgen.model.causal import CausalModel
from hpcgen.model.errors import ModelError
from hpcgen.model.forward_context import ForwardContext
from hpcgen.model.tensor_parallel import TensorParallelShard
from hpcgen.model.weight_file import WeightFile
from hpcgen.sequence import PAGE_TOKENS, Sequence, pages_for

if TYPE_CHECKING:
    from mpi4py import MPI

_NOBODY = (-1, -1)


def can_partition(model: CausalModel, ranks: int) -> bool:
    """Whether every layer of the model can be divided among so many ranks."""
    try:
        TensorParallelShard(model, 0, ranks)
    except ModelError:
        return False
    return True


class PartitionedDecode:
    """Decode steps of one sequence over all ranks of `comm`. Collective."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        model: CausalModel,
        directory: Path,
        weights: WeightFile,
        store: HostStore,
        attention: AttentionBackend,
        structured: StructuredOutput | None,
    ) -> None:
        """`model` is the whole one, with the experts backend that computes on this rank; another is built from
        `directory`."""
        from mpi4py import MPI

        self._mpi, self._comm = MPI, comm
        # In decode the model's own backend is the one that spreads experts over the ranks.
        self._experts = model.experts_backend
        self._whole, self._directory, self._weights = model, directory, weights
        self._store, self._attention, self._structured = store, attention, structured
        self._shard: TensorParallelShard | None = None
        self._pages = torch.empty(0, dtype=torch.uint8)
        self._holds = _NOBODY
        """(sequence, tokens of it) whose KV is in `_pages`, on every rank."""

    def decode(
        self, sequence: Sequence | None, steps: int, append: Callable[[Sequence, int], bool]
    ) -> tuple[int, bool]:
        """Up to `steps` tokens for the sequence that one rank gives; (steps done, whether `append` ended it)."""
        shard = self._shard or self._bind_shard()
        owner = self._comm.allreduce(-1 if sequence is None else self._comm.rank, op=self._mpi.MAX)
        start = (0, 0, 0) if sequence is None else (sequence.id, sequence.kv_length, sequence.output[-1])
        key, first, token = self._comm.bcast(start, root=owner)
        self._make_room(shard, pages_for(first + steps))
        if self._holds != (key, first):
            self._hand_out(shard, sequence, owner, pages_for(first))
        kv_length, ended = first, False
        while kv_length < first + steps and not ended:
            logits = self._forward(shard, token, kv_length, wanted=sequence is not None)
            kv_length += 1
            said = (0, False)
            if sequence is not None:
                sequence.kv_length = kv_length
                (token,) = sample(logits, [sequence], self._structured)
                said = token, append(sequence, token)
            token, ended = self._comm.bcast(said, root=owner)
        self._holds = _NOBODY if ended else (key, kv_length)
        if not ended:
            self._bring_back(shard, sequence, owner, range(first // PAGE_TOKENS, pages_for(kv_length)))
        return kv_length - first, ended

    def _bind_shard(self) -> TensorParallelShard:
        whole = self._whole
        model = CausalModel.build(self._directory, whole.dtype, whole.device, self._experts)
        shard = self._shard = TensorParallelShard(model, self._comm.rank, self._comm.size)
        for unit in model.units:
            shard.prepare(unit, {name: self._weights.get(name) for name in model.units[unit]}).apply()
        shard.sum_partials(self._sum)
        return shard

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        # MPI knows no bfloat16; sums in fp32 are what a rank alone would have.
        total = partial.float().cpu().contiguous()
        self._comm.Allreduce(self._mpi.IN_PLACE, total.numpy())
        return total.to(partial.device, partial.dtype)

    @torch.inference_mode()
    def _forward(self, shard: TensorParallelShard, token: int, kv_length: int, wanted: bool) -> torch.Tensor:
        """Logits [1, V] after `token` at position `kv_length`; [0, V] where none are wanted."""
        model, device = shard.model, shard.model.device
        table = np.arange(pages_for(kv_length + 1), dtype=np.int32)[None]
        batch = attention_batch(np.array([kv_length]), np.array([kv_length + 1]), table, device)
        self._attention.plan(batch)
        layers = shard.kv_layout.views(self._pages)
        hidden = model.embed(torch.tensor([token], device=device))
        rows = torch.zeros(1, dtype=torch.int64, device=device) if wanted else None
        return model.forward(hidden, ForwardContext(batch, self._attention, layers.__getitem__), rows)

    def _make_room(self, shard: TensorParallelShard, count: int) -> None:
        if len(self._pages) < count:
            wider = torch.zeros(2 * count, shard.kv_layout.page_bytes, dtype=torch.uint8, device=shard.model.device)
            wider[: len(self._pages)] = self._pages.view(-1, shard.kv_layout.page_bytes)
            self._pages = wider

    def _hand_out(self, shard: TensorParallelShard, sequence: Sequence | None, owner: int, count: int) -> None:
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
        self._pages[:count] = own.to(self._pages.device)

    def _bring_back(self, shard: TensorParallelShard, sequence: Sequence | None, owner: int, touched: range) -> None:
        """The pages that grew, of all ranks, to the owner's host store."""
        own = self._pages[touched.start : touched.stop].cpu().contiguous()
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
