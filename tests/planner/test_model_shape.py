import json

import pytest

from hpcgen.planner.errors import PlanError
from hpcgen.planner.model_shape import ModelShape
from tests.planner.shapes import LLAMA, PUBLISHED, deepseek, llama, qwen3_moe


def test_llama_3_2_1b_has_its_published_parameters():
    assert llama().parameters == pytest.approx(1.236e9, rel=0.001)


def test_qwen3_30b_a3b_has_its_published_parameters():
    assert qwen3_moe().parameters == pytest.approx(30.5e9, rel=0.005)
    assert qwen3_moe().active_parameters == pytest.approx(3.3e9, rel=0.12)  # published with both embeddings


def test_deepseek_r1_has_its_published_parameters_and_latent_kv():
    shape = deepseek()
    assert shape.parameters == pytest.approx(671e9, rel=0.001)
    assert shape.active_parameters == pytest.approx(37e9, rel=0.02)
    assert shape.kv_token_bytes == 61 * (512 + 64) * 2


def test_kimi_k2_has_its_published_parameters():
    shape = ModelShape.read(PUBLISHED / "kimi_k2.json")
    assert shape.parameters == pytest.approx(1026e9, rel=0.01)
    assert shape.active_parameters == pytest.approx(32e9, rel=0.02)


def test_grouped_query_kv_counts_the_kv_heads():
    assert llama().kv_token_bytes == 16 * 2 * 8 * 64 * 2


def test_fp8_weights_are_a_byte_and_the_head_two():
    shape = deepseek()
    assert shape.weight_bytes == 1.0
    assert shape.head_bytes == 2 * 129280 * 7168


def test_mxfp4_experts_are_a_quarter_of_bf16():
    config = LLAMA | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    shape = ModelShape.from_config(config, "gpt-oss")
    assert shape.expert_bytes == pytest.approx(0.53, abs=0.01)
    assert shape.weight_bytes == 2.0


def test_sliding_windows_bound_the_context_of_their_layers():
    kinds = ["sliding_attention", "full_attention"] * 8
    shape = ModelShape.from_config(LLAMA | {"sliding_window": 128, "layer_types": kinds}, "windowed")
    assert shape.attention.context(1024) == (1024 + 128) / 2
    assert shape.attention.context(64) == 64


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"config\.json cannot be read"):
        ModelShape.read(tmp_path)


def test_a_configuration_that_lacks_a_size_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(PlanError, match="num_hidden_layers"):
        ModelShape.read(tmp_path)
