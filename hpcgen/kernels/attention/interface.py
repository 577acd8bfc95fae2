"""Attention over paged KV: the data that crosses into a backend, and what a backend can do.

Shapes: T tokens packed over the batch, B sequences, P pages, N tokens in a page, H query heads, G KV heads, D head
dimension, R rank of the MLA latent, M most pages of a sequence.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch


class KVPages(NamedTuple):
    """KV of one layer, as two strided views into pages that hold all layers.

    For grouped-query attention `first` is K [P, N, G, D] and `second` is V [P, N, G, Dv].
    For MLA `first` is the latent [P, N, 1, R] and `second` the rotary key [P, N, 1, Drope].
    Within a page and layer each is contiguous; only the stride over P is larger than the extent.
    """

    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """A ragged batch of B sequences, packed without padding along T; query t of sequence b may be prefill or decode.

    The new tokens of a sequence are the last ones of its context (causal).
    """

    query_offsets: torch.Tensor
    """int32 [B + 1], on the CPU: sequence b owns rows [query_offsets[b], query_offsets[b + 1]) of T."""
    context_lengths: torch.Tensor
    """int32 [B], on the CPU: tokens of each sequence, the new ones included."""
    page_table: torch.Tensor
    """int32 [B, M], on the device: page of each 64 tokens; entries past the context are 0."""
    positions: torch.Tensor
    """int64 [T], on the device."""
    slots: torch.Tensor
    """int64 [T], on the device: page * N + offset where the KV of each new token goes."""

    @property
    def sequences(self) -> int:
        return len(self.context_lengths)

    @property
    def decode_only(self) -> bool:
        """Every sequence has just one new token."""
        return len(self.positions) == self.sequences


class AttentionBackend(Protocol):
    """One implementation of paged attention. It computes in the dtype of its inputs and accumulates in fp32."""

    name: str

    def plan(self, batch: AttentionBatch) -> None:
        """Called once a step before the layers; backends that schedule work by length (flashinfer) do so here."""

    def write(self, kv: KVPages, first: torch.Tensor, second: torch.Tensor, batch: AttentionBatch) -> None:
        """Stores the new tokens' K [T, G, D] and V [T, G, Dv] (MLA: latent [T, 1, R], rotary key [T, 1, Drope])."""

    def attend(
        self,
        query: torch.Tensor,
        kv: KVPages,
        batch: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal grouped-query attention. query [T, H, D] -> [T, H, Dv].

        `sliding_window` w: a query at position p sees keys in (p - w, p]. `sinks` [H]: a logit per head that joins
        the softmax and has no value (GPT-OSS).
        """

    def attend_latent(
        self, query_latent: torch.Tensor, query_rope: torch.Tensor, kv: KVPages, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """Absorbed MLA (DeepSeek-V2 §2.1.2): query_latent [T, H, R], query_rope [T, H, Drope] -> latent [T, H, R]."""


@dataclass(frozen=True, slots=True)
class RotaryInputs:
    """What the projections of a layer give, before norm and rotation; D the head dimension."""

    query: torch.Tensor
    """[T, H, D]; rotated in place."""
    key: torch.Tensor
    """[T, G, D]."""
    value: torch.Tensor
    """[T, G, Dv]. Of all three, a token's heads are contiguous, and the stride over tokens is the same."""
    cosine: torch.Tensor
    """[T, D], as transformers' rotary modules give it: both halves alike."""
    sine: torch.Tensor
    query_norm: torch.Tensor | None
    """[D], weight of a root-mean-square norm of each head."""
    key_norm: torch.Tensor | None
    epsilon: float
    """Of the norms."""


@runtime_checkable
class RotaryWriter(Protocol):
    """What an attention backend may do besides: norm, rotate and write the new tokens' KV in one pass."""

    def rotates(self, width: int, kv: KVPages) -> bool:
        """Whether it can, for heads of `width` in bf16 and these pages."""

    def rotate_and_write(self, inputs: RotaryInputs, kv: KVPages, batch: AttentionBatch) -> None:
        """Norms and rotates the queries in place and the keys, and stores keys and values."""
