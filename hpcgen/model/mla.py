"""Absorbed multi-head latent attention (DeepSeek-V2 §2.1.2): pages hold the latent, and are attended to as they are.

transformers caches the latent too, but expands the whole context to keys and values at every step. Here the
expansion is absorbed: q_nope W_UK attends to the latent, and W_UV is applied to what comes back. Only the `forward` of
the attention module is replaced; its weights are taken from its modules at each call, since they may be streamed.

T tokens, H heads, N nope dimensions, V value dimensions, R latent rank, P rotary dimensions.
"""

import inspect
from typing import Any, Literal

import torch
from torch import nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from hpcgen.model.forward_context import ForwardContext
from hpcgen.model.linear import dense_weight

Rotary = Literal["half", "pairs", "complex"]
_ROTARY = {
    "half": lambda q, k, embedding: modeling_deepseek_v3.apply_rotary_pos_emb(q, k, *embedding),
    "pairs": lambda q, k, embedding: modeling_deepseek_v3.apply_rotary_pos_emb_interleave(q, k, *embedding),
    "complex": lambda q, k, embedding: modeling_deepseek_v2.apply_rotary_emb(q, k, embedding),
}


class AbsorbedAttention:
    """The `forward` of a DeepSeek attention module, in the absorbed form."""

    def __init__(self, attention: nn.Module, rotary: Rotary) -> None:
        self.attention: Any = attention
        self.rotate = _ROTARY[rotary]

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: torch.Tensor | None = None,
        *,
        forward_context: ForwardContext,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, D] -> [1, T, D]."""
        a, context = self.attention, forward_context
        tokens = hidden_states.shape[1]
        q_nope_THN, q_rope_THP = self._query(hidden_states)
        latent, k_rope = a.kv_a_proj_with_mqa(hidden_states).split([a.kv_lora_rank, a.qk_rope_head_dim], -1)
        latent = a.kv_a_layernorm(latent).view(1, 1, tokens, a.kv_lora_rank)
        k_rope = k_rope.view(1, 1, tokens, a.qk_rope_head_dim)
        q_rope, k_rope = self.rotate(q_rope_THP.transpose(0, 1)[None], k_rope, position_embeddings)
        context.write(a.layer_idx, latent[0], k_rope[0])
        weight_HXR = dense_weight(a.kv_b_proj, hidden_states.dtype).view(
            -1, a.qk_nope_head_dim + a.v_head_dim, a.kv_lora_rank
        )
        key_HNR, value_HVR = weight_HXR.split([a.qk_nope_head_dim, a.v_head_dim], 1)
        attended_THR = context.attention.attend_latent(
            torch.einsum("thn,hnr->thr", q_nope_THN, key_HNR).contiguous(),
            q_rope[0].transpose(0, 1).contiguous(),
            context.kv(a.layer_idx),
            context.batch,
            a.scaling,
        )
        context.layer_done(a.layer_idx)
        attended_THV = torch.einsum("thr,hvr->thv", attended_THR, value_HVR)
        return a.o_proj(attended_THV.reshape(1, tokens, -1)), None

    def _query(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = self.attention
        if a.q_lora_rank is None:
            query = a.q_proj(hidden_states)
        else:
            query = a.q_b_proj(a.q_a_layernorm(a.q_a_proj(hidden_states)))
        nope, rope = query[0].view(len(query[0]), -1, a.qk_head_dim).split([a.qk_nope_head_dim, a.qk_rope_head_dim], -1)
        return nope, rope


def absorb(attention: nn.Module) -> bool:
    """Replaces the `forward` of a latent attention module by the absorbed one; False if it is another attention.

    Latent attention is what has DeepSeek-V2's or -V3's `forward`: transformers generates the definitions of families
    that share it as textual copies.
    """
    rotary = _rotary_of(attention)
    if rotary is not None:
        attention.__dict__["forward"] = AbsorbedAttention(attention, rotary)
    return rotary is not None


def _rotary_of(module: nn.Module) -> Rotary | None:
    source = inspect.getsource(type(module).forward)
    if source == inspect.getsource(modeling_deepseek_v2.DeepseekV2Attention.forward):
        return "complex"
    if source == inspect.getsource(modeling_deepseek_v3.DeepseekV3Attention.forward):
        return "pairs" if getattr(module.config, "rope_interleave", False) else "half"
    return None
