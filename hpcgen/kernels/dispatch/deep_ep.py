"""Dispatch between GPUs by DeepEP's `ElasticBuffer` (V2), over NVLink and RDMA."""

from types import ModuleType
from typing import Any

import torch

from hpcgen.errors import HpcgenError
from hpcgen.kernels.dispatch.interface import Dispatched, expert_range


class DeepEPDispatcher:
    """Tokens in bf16; a rank without tokens takes part like any other.

    DeepEP gives every rank the same number of experts. Where they do not divide, experts are renumbered so that each
    rank's share is filled up with experts that no token chooses.
    """

    name = "deep_ep"

    def __init__(
        self,
        deep_ep: ModuleType,
        group: torch.distributed.ProcessGroup,
        experts: int,
        max_tokens: int,
        hidden: int,
        top_k: int,
        device: torch.device,
    ) -> None:
        """`max_tokens`: most tokens that a rank dispatches at once; the same on all ranks of `group` (NCCL)."""
        self._index_dtype = deep_ep.topk_idx_t
        self._first, _ = expert_range(group.rank(), group.size(), experts)
        self._max_tokens = max_tokens
        self._number = _numbers(group.size(), experts).to(device, self._index_dtype)
        self._experts = group.size() * -(-experts // group.size())
        self._buffer = deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=max_tokens,
            hidden=hidden,
            num_topk=top_k,
            allow_multiple_reduction=False,  # one sum per token, in fp32
            explicitly_destroy=True,
        )

    def dispatch(self, hidden: torch.Tensor, top_index: torch.Tensor, top_weight: torch.Tensor) -> Dispatched:
        if hidden.dtype != torch.bfloat16:
            raise HpcgenError(f"deep_ep dispatches tokens in bfloat16, not {hidden.dtype}: use --dtype bfloat16.")
        if len(hidden) > self._max_tokens:
            raise ValueError(f"{len(hidden)} tokens, but the buffer was made for {self._max_tokens}")
        received, local_index, weight, handle, _ = self._buffer.dispatch(
            hidden.contiguous(),
            topk_idx=self._number[top_index],
            topk_weights=top_weight.float().contiguous(),
            num_experts=self._experts,
        )
        # Numbers come as the rank's own, from 0, and -1 for experts elsewhere.
        top = torch.where(local_index < 0, -1, local_index.long() + self._first)
        return Dispatched(received, top, weight, handle)

    def combine(self, out: torch.Tensor, handle: Any) -> torch.Tensor:
        combined, _, _ = self._buffer.combine(out, handle)
        return combined

    def close(self) -> None:
        """Releases the buffer; collective."""
        self._buffer.destroy()


def _numbers(ranks: int, experts: int) -> torch.Tensor:
    """[experts]: DeepEP's number of each expert, whose owner is that number // the (rounded up) share of a rank."""
    share = -(-experts // ranks)
    ranges = [expert_range(rank, ranks, experts) for rank in range(ranks)]
    return torch.cat([rank * share + torch.arange(count) for rank, (_, count) in enumerate(ranges)])
