"""Quantised checkpoints stay quantised in the weight file, and mean what transformers takes them to mean."""

from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcgen.kernels.dequantize import dequantize
from hpcgen.model.conversion import ConversionError, convert, export_safetensors
from hpcgen.model.errors import ModelError
from hpcgen.model.quantization import coarsen_scale, common_block, quantization_of, refine_scale
from hpcgen.model.weight_file import WeightFile
from hpcgen.model.weight_verify import verify

from .checkpoints import (
    dequantize_fp8,
    edit_config,
    edit_weights,
    quantize_fp8,
    read_weights,
    save_fp8,
    save_mxfp4,
)
from .tiny_models import save_tiny


def transformers_parameters(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What transformers dequantises the checkpoint to on a CPU."""
    pytest.importorskip("accelerate")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).state_dict()


# On a CPU transformers takes the number of blocks for their size, so only blocks that divide every shape compare.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "block"), [("llama", (32, 16)), ("qwen3_moe", (16, 16)), ("deepseek_v3", (8, 4))])
def test_fp8_weights_equal_those_of_transformers(name, block, dtype, tmp_path: Path) -> None:
    save_fp8(name, tmp_path / "model", block)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights", dtype=dtype))
    for weight, expected in transformers_parameters(tmp_path / "model", dtype).items():
        assert torch.equal(dequantize(file.get(weight), expected.dtype), expected), weight
    quantized = [weight for weight in file.names if file.get(weight).layout == "fp8-block"]
    assert all(file.get(weight).data.dtype == torch.float8_e4m3fn for weight in quantized)
    assert verify(file.path) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_mxfp4_weights_equal_those_of_transformers(dtype, tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "model")
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights", dtype=dtype))
    for weight, expected in transformers_parameters(tmp_path / "model", dtype).items():
        stored = file.get(weight)
        assert stored.shape == expected.shape
        assert torch.equal(dequantize(stored, expected.dtype), expected), weight
    experts = file.get("model.layers.1.mlp.experts.gate_up_proj")
    assert experts.layout == "mxfp4"
    assert experts.data.numel() == torch.Size(experts.shape).numel() // 2
    assert verify(file.path) == []


@pytest.mark.parametrize("block", [(128, 128), (20, 24), (64, 32), (7, 5), None])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_fp8_blocks_need_not_divide_the_shape(name, block, tmp_path: Path) -> None:
    save_fp8(name, tmp_path / "model", block)
    published = read_weights(tmp_path / "model")
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights"))

    def expected(key: str) -> torch.Tensor:
        weight, scale = published[f"{key}.weight"], published[f"{key}.weight_scale_inv"]
        return dequantize_fp8(weight, scale.reshape(1, 1) if block is None else scale, block or weight.shape).bfloat16()

    for weight in file.names:
        stored = file.get(weight)
        if stored.layout == "plain":
            continue
        if "experts." not in weight or "shared_experts" in weight:
            assert torch.equal(dequantize(stored, torch.bfloat16), expected(weight.removesuffix(".weight")))
            continue
        stack, _, kind = weight.rpartition(".")
        for expert in range(stored.shape[0]):
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            merged = torch.cat([expected(f"{stack}.{expert}.{part}") for part in parts])
            assert torch.equal(dequantize(stored, torch.bfloat16, expert), merged), weight


@pytest.mark.parametrize("block", [(16, 16), (20, 24), None])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_export_gives_the_fp8_checkpoint_back(name, block, tmp_path: Path) -> None:
    save_fp8(name, tmp_path / "model", block)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights"))
    assert_same_bytes(read_weights(export_safetensors(file, tmp_path / "exported")), read_weights(tmp_path / "model"))


def test_export_gives_the_mxfp4_checkpoint_back(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "model")
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights"))
    assert_same_bytes(read_weights(export_safetensors(file, tmp_path / "exported")), read_weights(tmp_path / "model"))


def assert_same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, published in expected.items():
        tensor = published.to(found[key].dtype)  # a router gate may be cast
        assert found[key].shape == tensor.shape, key
        assert torch.equal(found[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key


def test_power_of_two_scales_are_kept_as_multipliers(tmp_path: Path) -> None:
    save_fp8("llama", tmp_path / "model", (16, 16))
    tensors = read_weights(tmp_path / "model")
    powers = {key: t.to(torch.float8_e8m0fnu) for key, t in tensors.items() if key.endswith("_scale_inv")}
    edit_weights(tmp_path / "model", tensors | powers)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights"))
    key = "model.layers.1.mlp.up_proj.weight"
    expected = dequantize_fp8(tensors[key], powers[f"{key}_scale_inv"].float(), (16, 16)).bfloat16()
    assert torch.equal(dequantize(file.get(key), torch.bfloat16), expected)


def test_weights_whose_scales_cannot_follow_the_converter_are_dequantised(tmp_path: Path, monkeypatch) -> None:
    save_fp8("qwen3_moe", tmp_path / "model", (16, 16))
    monkeypatch.setattr("hpcgen.model.conversion.plan.merges_rows", lambda converter: False)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights"))
    assert file.get("model.layers.0.mlp.experts.gate_up_proj").layout == "plain"
    for weight, expected in transformers_parameters(tmp_path / "model", torch.bfloat16).items():
        assert torch.equal(dequantize(file.get(weight), torch.bfloat16), expected), weight


def test_mxfp4_blocks_of_the_wrong_shape_are_named(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "model")
    tensors = read_weights(tmp_path / "model")
    key = "model.layers.0.mlp.experts.down_proj_blocks"
    for damaged in (tensors[key].flatten(2), tensors[key][:, :32].contiguous()):
        edit_weights(tmp_path / "model", {**tensors, key: damaged})
        with pytest.raises(ConversionError, match=r"experts\.down_proj has shape \[8, 32, 64\] by config\.json"):
            convert(tmp_path / "model", tmp_path / "weights")


def test_static_activation_scales_are_left_out(tmp_path: Path) -> None:
    save_fp8("llama", tmp_path / "model", None)
    extra = {"model.layers.0.mlp.up_proj.activation_scale": torch.tensor(1.0)}
    edit_weights(tmp_path / "model", read_weights(tmp_path / "model") | extra)
    assert verify(convert(tmp_path / "model", tmp_path / "weights")) == []


def test_an_expert_without_scales_among_others_with_them_is_named(tmp_path: Path) -> None:
    save_fp8("qwen3_moe", tmp_path / "model", (16, 16))
    tensors = read_weights(tmp_path / "model")
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight_scale_inv"]
    edit_weights(tmp_path / "model", tensors)
    with pytest.raises(ConversionError, match=r"experts\.3\.up_proj\.weight has no scales"):
        convert(tmp_path / "model", tmp_path / "weights")


def test_scales_that_do_not_fit_the_block_size_of_the_configuration_are_named(tmp_path: Path) -> None:
    save_fp8("llama", tmp_path / "model", (16, 16))
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    edit_config(tmp_path / "model", quantization_config=scheme)
    with pytest.raises(ConversionError, match=r"weight_scale_inv has shape \[.*weight_block_size"):
        convert(tmp_path / "model", tmp_path / "weights")


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors"])
def test_other_quantisation_is_refused_by_name(method: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    edit_config(tmp_path / "model", quantization_config={"quant_method": method})
    with pytest.raises(ModelError, match=f"'{method}', which is not supported: use the unquantised"):
        convert(tmp_path / "model", tmp_path / "weights")


def test_a_model_without_quantisation_has_no_scheme() -> None:
    assert quantization_of({"quantization_config": None}) is None


def test_refined_scales_give_the_same_weights_and_can_be_coarsened_again() -> None:
    for rows, columns, block in product([32, 48, 50], [16, 40], [(16, 16), (32, 24), (128, 128)]):
        weight, scale = quantize_fp8(torch.randn(rows, columns), block)
        target = common_block(block, [weight.shape, weight.shape])
        refined = refine_scale(scale, weight.shape, block, target)
        assert rows % target[0] == 0
        assert torch.equal(dequantize_fp8(weight, refined, target), dequantize_fp8(weight, scale, block))
        assert torch.equal(coarsen_scale(refined, target, block), scale)
