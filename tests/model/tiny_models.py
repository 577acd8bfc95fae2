"""Tiny random models of every supported family, as transformers builds them: what parity is measured against."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 256
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "intermediate_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral_sliding": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "topk_method": "group_limited_greedy", "n_shared_experts": 2}),
    "deepseek_v2_lite": (
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": _YARN},
    ),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "rope_parameters": _YARN}),
    # Kimi-K2: more experts than DeepSeek-V3 in one group, fewer heads, one dense layer.
    "kimi_k2": (
        "kimi_k2",
        {
            **_LATENT,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 24,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {**_YARN, "factor": 2.0},
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "num_hidden_layers": 4,
        },
    ),
}


def tiny_config(name: str) -> PreTrainedConfig:
    model_type, options = TINY[name]
    known_as = "deepseek_v3" if model_type == "kimi_k2" else model_type
    return CONFIG_MAPPING[known_as](**{**_COMMON, **options})


def build_tiny(name: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A random model with transformers' eager attention and experts; the same weights for the same seed."""
    return randomize(AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager"), dtype, seed)


def tiny_with(name: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    """As `build_tiny`, with some fields of the configuration changed."""
    config = type(tiny_config(name)).from_dict({**tiny_config(name).to_dict(), **changes})
    return randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), dtype)


def randomize(model: PreTrainedModel, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """Weights large enough that every part of the model shows in its logits; routers stay in the dtype they have."""
    generator = torch.Generator().manual_seed(seed)
    keep_fp32 = {"e_score_correction_bias", *(["gate.weight"] if "deepseek" in model.config.model_type else [])}
    for name, tensor in model.state_dict(keep_vars=True).items():
        noise = torch.randn(tensor.shape, generator=generator)
        values = 1 + 0.1 * noise if "norm" in name else (0.15 if tensor.ndim > 1 else 0.1) * noise
        tensor.data = values if any(name.endswith(part) for part in keep_fp32) else values.to(dtype)
    model.tie_weights()
    model.set_experts_implementation("eager")
    return model.eval().requires_grad_(False)


def save_tiny(name: str, directory: Path, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """Saves `build_tiny(name, dtype)` as a Hugging Face model directory, and gives the model."""
    model = build_tiny(name, dtype, seed)
    model.save_pretrained(directory)
    if TINY[name][0] == "kimi_k2":
        file = directory / "config.json"
        file.write_text(file.read_text().replace('"deepseek_v3"', '"kimi_k2"'))
    return model
