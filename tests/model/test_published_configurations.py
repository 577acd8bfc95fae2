"""The configurations that models are published with, at full size on the meta device: parameters and KV add up.

The files are shortened to what decides about the architecture. Parameter counts are those that the models' reports
give; DeepSeek's and Kimi's without the layer for multi-token prediction.
"""

import json
from pathlib import Path

import pytest
import torch

from hpcgen.model.causal import CausalModel

YARN = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280,
    "hidden_size": 7168, "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000, "max_position_embeddings": 163840,
    "rope_scaling": {**YARN, "factor": 40, "original_max_position_embeddings": 4096}, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict, float, int]] = {
    "SmolLM2-135M": (
        {
            "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "rope_theta": 100000,
            "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
        },
        0.1345, 30 * 2 * 3 * 64,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "norm_topk_prob": True, "rope_theta": 1000000.0, "sliding_window": None,
            "use_sliding_window": False, "max_window_layers": 48, "tie_word_embeddings": False,
        },
        30.53, 48 * 2 * 4 * 128,
    ),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
            "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1000000.0,
        },
        46.70, 32 * 2 * 8 * 128,
    ),
    "DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944,
            "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
            "n_group": 1, "topk_group": 1, "topk_method": "greedy", "first_k_dense_replace": 1, "q_lora_rank": None,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "max_position_embeddings": 163840,
            "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707, "factor": 40,
                             "original_max_position_embeddings": 4096},
        },
        15.71, 27 * 576,
    ),
    "DeepSeek-R1": (DEEPSEEK_V3, 671.0, 61 * 576),
    "Kimi-K2": (
        {
            **DEEPSEEK_V3, "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64,
            "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827,
            "rope_theta": 50000.0, "max_position_embeddings": 131072,
            "rope_scaling": {**YARN, "factor": 32, "beta_fast": 1.0, "original_max_position_embeddings": 4096},
        },
        1026.4, 61 * 576,
    ),
    "gpt-oss-120b": (
        {
            "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
            "num_local_experts": 128, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128,
            "attention_bias": True, "swiglu_limit": 7.0, "layer_types": ["sliding_attention", "full_attention"] * 18,
            "rope_theta": 150000, "max_position_embeddings": 131072,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                             "original_max_position_embeddings": 4096, "truncate": False},
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        },
        116.83, 36 * 2 * 8 * 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_built(name, tmp_path: Path):
    content, billions, kv_elements = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = CausalModel.build(tmp_path, torch.bfloat16, torch.device("cpu"))
    parameters = sum(torch.Size(model.shape_of(tensor)).numel() for names in model.units.values() for tensor in names)
    assert parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    layout = model.kv_layout
    assert layout.page_bytes == 64 * kv_elements * 2
    assert model.layers == content["num_hidden_layers"]
    is_sparse = any("experts" in option for option in content)
    assert len(model.experts) == (model.layers - content.get("first_k_dense_replace", 0) if is_sparse else 0)


@pytest.mark.parametrize("name", ["DeepSeek-R1", "Kimi-K2", "DeepSeek-V2-Lite"])
def test_yarn_scales_the_softmax_of_latent_attention(name, tmp_path: Path):
    content = PUBLISHED[name][0]
    (tmp_path / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 2}))
    model = CausalModel.build(tmp_path, torch.bfloat16, torch.device("cpu"))
    rope = content["rope_scaling"]
    mscale = 0.1 * rope["mscale_all_dim"] * torch.tensor(float(rope["factor"])).log().item() + 1.0
    assert model.attention_stage(0).scaling == pytest.approx(mscale**2 * 192**-0.5)
