"""Families without a description of their own run with parity, or are refused with the reason: never wrongly."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hpcgen.model.causal import CausalModel
from hpcgen.model.errors import ModelError

from .paged import PagedRunner, bound_model, run_plan
from .tiny_models import VOCABULARY, randomize

PLAN = [[20, 60, 3], [1, 1, 1], [1, 1, 1], [25, 1, 0], [200, 200, 200]]
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
RUN: dict[str, dict] = {
    "mistral": {"sliding_window": 8},
    "gemma": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "phi": {},
    "phi3": {"sliding_window": None},
    "glm4": {"head_dim": 16},
    "cohere2": {"head_dim": 16, "sliding_window": 8},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "smollm3": {},
    "starcoder2": {"sliding_window": None},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 512},
    "gpt_neox": {},
    "olmoe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "granitemoe": EXPERTS,
    "glm4_moe": {**EXPERTS, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "head_dim": 16},
    "glm4_moe_lite": {**EXPERTS, **LATENT, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
}
REFUSED: dict[str, tuple[dict, str]] = {
    "gemma2": ({"head_dim": 16}, "softcap"),
    "gemma3": ({}, "multimodal"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "keys and values once"),
    "falcon": ({}, "cannot be built"),
    "mpt": ({}, "paged keys and values"),
    "stablelm": ({}, "do not pass arguments on"),
    "mamba": ({}, "self_attn"),
    "qwen3_next": ({}, "linear_attention"),
    "llama4_text": ({}, "chunked_attention"),
    "t5": ({}, "no causal language model"),
    "bart": ({}, "encoder-decoder"),
    "bert": ({}, "no norm after"),
    "phimoe": ({**EXPERTS, "sliding_window": 8}, "window of layer 0"),
}  # fmt: skip


def tiny(model_type: str, options: dict):
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(config_class.attribute_map)
    return config_class(**{k: v for k, v in {**BASE, **options}.items() if k in known or k in options})


@pytest.mark.parametrize("model_type", RUN)
def test_a_family_without_a_description_has_parity(model_type):
    config = tiny(model_type, RUN[model_type])
    reference = randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), torch.float32)
    model = bound_model(reference, model_type, torch.float32)
    assert not model.family.measured
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (50, 70, 9)]
    with torch.inference_mode():
        found = run_plan(PagedRunner(model, len(tokens)), tokens, PLAN)
        for sequence, logits in zip(tokens, found, strict=True):
            expected = reference(sequence[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits, expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_paged_kv_cannot_serve_is_refused_with_the_reason(model_type):
    options, reason = REFUSED[model_type]
    config = CONFIG_MAPPING[model_type](**options)
    with pytest.raises(ModelError, match=reason) as refusal:
        CausalModel.from_config(model_type, config, torch.float32, torch.device("cpu"))
    assert "not supported" in str(refusal.value) or model_type in str(refusal.value)
