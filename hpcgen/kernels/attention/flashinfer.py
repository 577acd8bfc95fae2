"""Attention on CUDA by flashinfer (Ye et al., MLSys'25): paged prefill and decode, sinks, and MLA.

Pages are strided views; flashinfer takes the strides of the tensors it is given. A step's batch is turned into its
compressed rows once, and each kind of layer (heads, window, scale) is planned once a step, at its first layer.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from hpcgen.kernels.attention.interface import AttentionBatch, KVPages
from hpcgen.kernels.attention.torch_reference import TorchAttention

WORKSPACE_BYTES = 128 << 20
"""What flashinfer's documentation starts from; all plans share it, since layers run one after the other."""
MLA_RANK, MLA_ROPE = 512, 64
"""The widths its MLA kernels are built for, those of DeepSeek-V2 and V3."""
TENSOR_CORE_GROUP = 4
"""From so many query heads per KV head on, decode by tensor cores is the faster one."""


@dataclass(frozen=True)
class CompressedRows:
    """Pages of a batch as flashinfer wants them; offsets on the CPU, where it plans."""

    query_offsets: torch.Tensor
    """int32 [B + 1]"""
    page_offsets: torch.Tensor
    """int32 [B + 1]: sequence b has pages[page_offsets[b] : page_offsets[b + 1]]."""
    pages: torch.Tensor
    """int32 [pages of all sequences], on the device."""
    last_page_tokens: torch.Tensor
    """int32 [B]"""
    context_lengths: torch.Tensor
    """int32 [B]"""


def compress(batch: AttentionBatch, page_tokens: int) -> CompressedRows:
    """No values come from the device: the lengths on the CPU say which entries of the page table are used."""
    lengths = batch.context_lengths
    counts = (lengths + page_tokens - 1) // page_tokens
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    offsets[1:] = counts.cumsum(0)
    rows = torch.arange(len(lengths)).repeat_interleave(counts)
    columns = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(counts)
    device = batch.page_table.device
    flat = (rows * batch.page_table.shape[1] + columns).to(device, non_blocking=True)
    pages = batch.page_table.reshape(-1)[flat]
    return CompressedRows(batch.query_offsets, offsets, pages, (lengths - 1) % page_tokens + 1, lengths)


class FlashInferAttention:
    """Attention in fp16 and bf16 on CUDA. MLA of other widths than DeepSeek's is left to torch."""

    name = "flashinfer"

    def __init__(self, flashinfer: ModuleType, device: torch.device) -> None:
        self._flashinfer = flashinfer
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[Hashable, Any] = {}
        self._planned: set[Hashable] = set()
        self._batch: AttentionBatch | None = None
        self._rows: CompressedRows | None = None
        self._torch = TorchAttention()

    def plan(self, batch: AttentionBatch) -> None:
        self._batch, self._rows = batch, None
        self._planned.clear()

    def write(self, kv: KVPages, first: torch.Tensor, second: torch.Tensor, batch: AttentionBatch) -> None:
        self._torch.write(kv, first, second, batch)

    def attend(
        self,
        query: torch.Tensor,
        kv: KVPages,
        batch: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        window_left = -1 if sliding_window is None else sliding_window - 1
        if sinks is not None:
            wrapper = self._with_sinks(query, kv, batch, scale, window_left)
            return wrapper.run(query, tuple(kv), sinks.float(), scale)
        if batch.decode_only and kv.first.shape[3] == kv.second.shape[3]:
            return self._decode(query, kv, batch, scale, window_left).run(query, tuple(kv))
        return self._prefill(query, kv, batch, scale, window_left).run(query, tuple(kv))

    def attend_latent(
        self, query_latent: torch.Tensor, query_rope: torch.Tensor, kv: KVPages, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        if (query_latent.shape[2], query_rope.shape[2]) != (MLA_RANK, MLA_ROPE):
            return self._torch.attend_latent(query_latent, query_rope, kv, batch, scale)
        wrapper = self._latent(query_latent, kv, batch, scale)
        # The wrapper's caches have no dimension for the one head.
        return wrapper.run(query=(query_latent, query_rope), kv_cache=(kv.first[:, :, 0], kv.second[:, :, 0]))

    def _prefill(self, query: torch.Tensor, kv: KVPages, batch: AttentionBatch, scale: float, window_left: int) -> Any:
        key = ("prefill", *_shape(query, kv), scale, window_left)
        wrapper, rows = self._wrapper(key, batch, kv, self._flashinfer.BatchPrefillWithPagedKVCacheWrapper)
        if rows is not None:
            _plan_prefill(wrapper, rows, query, kv, scale, window_left)
        return wrapper

    def _with_sinks(
        self, query: torch.Tensor, kv: KVPages, batch: AttentionBatch, scale: float, window_left: int
    ) -> Any:
        """The kernel with sinks is a variant of prefill that also decodes, compiled for its widths and window."""
        key = ("sinks", *_shape(query, kv), scale, window_left)
        wrapper, rows = self._wrapper(
            key,
            batch,
            kv,
            self._flashinfer.BatchAttentionWithAttentionSinkWrapper,
            q_data_type=query.dtype,
            kv_data_type=kv.first.dtype,
            head_dim_qk=kv.first.shape[3],
            head_dim_vo=kv.second.shape[3],
            window_left=window_left,
        )
        if rows is not None:
            _plan_prefill(wrapper, rows, query, kv, scale, window_left)
        return wrapper

    def _decode(self, query: torch.Tensor, kv: KVPages, batch: AttentionBatch, scale: float, window_left: int) -> Any:
        heads, groups = query.shape[1], kv.first.shape[2]
        key = ("decode", *_shape(query, kv), scale, window_left)
        wrapper, rows = self._wrapper(
            key,
            batch,
            kv,
            self._flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            use_tensor_cores=heads // groups >= TENSOR_CORE_GROUP,
        )
        if rows is not None:
            wrapper.plan(
                rows.page_offsets,
                rows.pages,
                rows.last_page_tokens,
                heads,
                groups,
                kv.first.shape[3],
                kv.first.shape[1],
                window_left=window_left,
                sm_scale=scale,
                q_data_type=query.dtype,
                kv_data_type=kv.first.dtype,
            )
        return wrapper

    def _latent(self, query: torch.Tensor, kv: KVPages, batch: AttentionBatch, scale: float) -> Any:
        key = ("latent", *_shape(query, kv), scale)
        wrapper, rows = self._wrapper(key, batch, kv, self._flashinfer.mla.BatchMLAPagedAttentionWrapper)
        if rows is not None:
            wrapper.plan(
                metadata=self._flashinfer.mla.MLAPlanMetadata.csr(
                    qo_indptr=rows.query_offsets,
                    kv_indptr=rows.page_offsets,
                    kv_indices=rows.pages,
                    kv_len_arr=rows.context_lengths,
                ),
                num_heads=query.shape[1],
                head_dim_ckv=kv.first.shape[3],
                head_dim_kpe=kv.second.shape[3],
                page_size=kv.first.shape[1],
                causal=True,
                sm_scale=scale,
                q_data_type=query.dtype,
                kv_data_type=kv.first.dtype,
                query_layout="split",
                kv_cache_layout="split",
            )
        return wrapper

    def _wrapper(
        self, key: Hashable, batch: AttentionBatch, kv: KVPages, make: Any, **options: Any
    ) -> tuple[Any, CompressedRows | None]:
        """The wrapper of this kind of layer, and the rows to plan it with where this batch has not been planned."""
        if batch is not self._batch:
            self.plan(batch)
        if key not in self._wrappers:
            self._wrappers[key] = make(self._workspace, **options)
        if key in self._planned:
            return self._wrappers[key], None
        if self._rows is None:
            self._rows = compress(batch, kv.first.shape[1])
        self._planned.add(key)
        return self._wrappers[key], self._rows


def _shape(query: torch.Tensor, kv: KVPages) -> tuple[Hashable, ...]:
    return (query.shape[1:], kv.first.shape[2:], kv.second.shape[2:], query.dtype, kv.first.dtype)


def _plan_prefill(
    wrapper: Any, rows: CompressedRows, query: torch.Tensor, kv: KVPages, scale: float, window_left: int
) -> None:
    wrapper.plan(
        rows.query_offsets,
        rows.page_offsets,
        rows.pages,
        rows.last_page_tokens,
        query.shape[1],
        kv.first.shape[2],
        kv.first.shape[3],
        kv.first.shape[1],
        head_dim_vo=kv.second.shape[3],
        causal=True,
        sm_scale=scale,
        window_left=window_left,
        q_data_type=query.dtype,
        kv_data_type=kv.first.dtype,
    )
