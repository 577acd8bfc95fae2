"""Attention in C++ (`kernels/native/attention.cpp`): prefill and decode of one ragged batch in one call."""

import torch

from hpcgen.kernels.attention.interface import AttentionBatch, KVPages, RotaryInputs
from hpcgen.kernels.native.library import ROW_MULTIPLE, WIDEST_HEAD, AttentionCall, NativeLibrary, RotaryCall
from hpcgen.sequence import PAGE_TOKENS


class NativeAttention:
    """Paged attention in bf16 and fp32 on the CPU, for pages of PAGE_TOKENS tokens."""

    name = "native"

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def plan(self, batch: AttentionBatch) -> None:
        pass

    def write(self, kv: KVPages, first: torch.Tensor, second: torch.Tensor, batch: AttentionBatch) -> None:
        for pages, rows in zip(kv, (first, second), strict=True):
            self._library.write_pages(pages, rows.to(pages.dtype), batch.slots)

    def rotates(self, width: int, kv: KVPages) -> bool:
        return width % ROW_MULTIPLE == 0 and width <= WIDEST_HEAD and kv.first.dtype == torch.bfloat16

    def rotate_and_write(self, inputs: RotaryInputs, kv: KVPages, batch: AttentionBatch) -> None:
        query, key, value = inputs.query, inputs.key, inputs.value
        cosine, sine = inputs.cosine.contiguous(), inputs.sine.contiguous()
        norms = [None if norm is None else norm.data_ptr() for norm in (inputs.query_norm, inputs.key_norm)]
        self._library.rotate_and_write(
            RotaryCall(
                query=query.data_ptr(),
                key=key.data_ptr(),
                value=value.data_ptr(),
                row_stride=query.stride(0),
                query_norm=norms[0],
                key_norm=norms[1],
                epsilon=inputs.epsilon,
                cosine=cosine.data_ptr(),
                sine=sine.data_ptr(),
                key_pages=kv.first.data_ptr(),
                value_pages=kv.second.data_ptr(),
                key_page_stride=kv.first.stride(0),
                value_page_stride=kv.second.stride(0),
                slots=batch.slots.data_ptr(),
                tokens=len(query),
                heads=query.shape[1],
                groups=key.shape[1],
                width=query.shape[2],
                value_width=value.shape[2],
            )
        )

    def attend(
        self,
        query: torch.Tensor,
        kv: KVPages,
        batch: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = query.contiguous()
        out = query.new_empty(*query.shape[:2], kv.second.shape[3])
        sinks = None if sinks is None else sinks.float().contiguous()
        call = _call(query, kv, batch, scale)
        call.out, call.value_width = out.data_ptr(), out.shape[2]
        call.window = sliding_window or 0
        call.sinks = None if sinks is None else sinks.data_ptr()
        self._library.attention(call, query.dtype)
        return out

    def attend_latent(
        self, query_latent: torch.Tensor, query_rope: torch.Tensor, kv: KVPages, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        query_latent, query_rope = query_latent.contiguous(), query_rope.contiguous()
        out = torch.empty_like(query_latent)
        call = _call(query_latent, kv, batch, scale)
        call.out, call.value_width = out.data_ptr(), out.shape[2]
        call.query_rope, call.rope_width = query_rope.data_ptr(), query_rope.shape[2]
        self._library.attention(call, query_latent.dtype)
        return out


def _call(query: torch.Tensor, kv: KVPages, batch: AttentionBatch, scale: float) -> AttentionCall:
    """All that grouped-query attention and MLA share."""
    if kv.first.shape[1] != PAGE_TOKENS:
        raise ValueError(f"pages of {kv.first.shape[1]} tokens: the C++ kernels read pages of {PAGE_TOKENS}")
    if kv.first.dtype != query.dtype:
        raise ValueError(f"KV of {kv.first.dtype} and queries of {query.dtype}: the C++ kernels need one dtype")
    return AttentionCall(
        query=query.data_ptr(),
        first=kv.first.data_ptr(),
        second=kv.second.data_ptr(),
        first_page_stride=kv.first.stride(0),
        second_page_stride=kv.second.stride(0),
        page_table=batch.page_table.data_ptr(),
        table_stride=batch.page_table.stride(0),
        query_offsets=batch.query_offsets.data_ptr(),
        context_lengths=batch.context_lengths.data_ptr(),
        sequences=batch.sequences,
        heads=query.shape[1],
        groups=kv.first.shape[2],
        width=query.shape[2],
        scale=scale,
    )
