"""Every weight of every family arrives in the weight file as transformers would load it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcgen.kernels.layouts import unpack
from hpcgen.model.conversion import ConversionError, convert, export_safetensors, pieces
from hpcgen.model.errors import ModelError
from hpcgen.model.weight_file import WeightFile
from hpcgen.model.weight_format import WeightFileError
from hpcgen.model.weight_verify import verify

from .checkpoints import edit_config, edit_weights, read_weights
from .tiny_models import TINY, save_tiny


def assert_equals_state_dict(file: WeightFile, state: dict[str, torch.Tensor], loaded: bool = False) -> None:
    """`loaded`: the state is that of a loaded model, so dtypes are equal too; transformers casts when it loads."""
    assert {*file.names, *file.aliases} == set(state)
    for name, tensor in state.items():
        stored = file.get(name)
        assert stored.layout == "plain"
        assert stored.shape == tensor.shape
        assert stored.data.dtype == tensor.dtype or not loaded, name
        assert torch.equal(stored.data, tensor.to(stored.data.dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_every_weight_equals_the_models_state_dict(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path / "model", dtype)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights"))
    assert_equals_state_dict(file, model.state_dict())


# transformers loads Kimi-K2 only with the checkpoint's own code; it is DeepSeek-V3 here.
@pytest.mark.parametrize("name", [name for name in TINY if name != "kimi_k2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_dtype_asked_for_is_cast_to_as_transformers_does(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model", torch.bfloat16)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights", dtype=dtype))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    assert_equals_state_dict(file, loaded.state_dict(), loaded=True)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral"])
def test_a_sharded_checkpoint_gives_the_same_file_as_a_single_one(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path / "single", torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single = WeightFile(convert(tmp_path / "single", tmp_path / "a"))
    sharded = WeightFile(convert(tmp_path / "sharded", tmp_path / "b"))
    assert single.names == sharded.names
    assert all(single.checksum(name) == sharded.checksum(name) for name in single.names)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_merged_one_at_a_time_are_those_merged_at_once(name: str, tmp_path: Path, monkeypatch) -> None:
    model = save_tiny(name, tmp_path / "model", torch.bfloat16)
    monkeypatch.setattr(pieces, "CHUNK_BYTES", 1)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights"))
    assert_equals_state_dict(file, model.state_dict())


def test_a_tied_head_is_stored_once_and_found_under_both_names(tmp_path: Path) -> None:
    save_tiny("llama_tied", tmp_path / "model", torch.bfloat16)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights"))
    assert "lm_head.weight" not in file.names
    assert "head" not in file.units
    assert file.get("lm_head.weight").data.data_ptr() == file.get("model.embed_tokens.weight").data.data_ptr()


def test_a_tied_model_may_store_only_its_head(tmp_path: Path) -> None:
    model = save_tiny("llama_tied", tmp_path / "model", torch.bfloat16)
    tensors = read_weights(tmp_path / "model")
    edit_weights(tmp_path / "model", {key.replace("model.embed_tokens", "lm_head"): t for key, t in tensors.items()})
    assert_equals_state_dict(WeightFile(convert(tmp_path / "model", tmp_path / "weights")), model.state_dict())


def test_a_tied_model_with_two_different_tensors_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    edit_config(tmp_path / "model", tie_word_embeddings=True)
    with pytest.raises(ConversionError, match='set "tie_word_embeddings" to false'):
        convert(tmp_path / "model", tmp_path / "weights")


def test_units_follow_the_order_of_a_forward(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path / "model", torch.bfloat16)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights"))
    assert list(file.units) == ["embedding", "layer.0", "layer.1", "layer.2", "final_norm", "head"]
    assert file.unit_names("head") == ("lm_head.weight",)
    assert file.unit_names("final_norm") == ("model.norm.weight",)
    starts = [file.record(name).start for name in file.names]
    assert starts == sorted(starts)


def test_layers_for_multi_token_prediction_and_old_rotary_buffers_are_skipped(tmp_path: Path) -> None:
    model = save_tiny("deepseek_v3", tmp_path / "model", torch.bfloat16)
    extra = {
        "model.layers.3.eh_proj.weight": torch.ones(2, 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    edit_weights(tmp_path / "model", read_weights(tmp_path / "model") | extra)
    assert_equals_state_dict(WeightFile(convert(tmp_path / "model", tmp_path / "weights")), model.state_dict())


def test_a_checkpoint_saved_from_the_base_model_has_its_prefix_added(tmp_path: Path) -> None:
    model = save_tiny("llama_tied", tmp_path / "model", torch.bfloat16)
    tensors = read_weights(tmp_path / "model")
    edit_weights(tmp_path / "model", {key.removeprefix("model."): tensor for key, tensor in tensors.items()})
    assert_equals_state_dict(WeightFile(convert(tmp_path / "model", tmp_path / "weights")), model.state_dict())


def test_progress_grows_to_all_bytes(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path / "model", torch.bfloat16)
    seen: list[tuple[int, int, str]] = []
    file = WeightFile(
        convert(tmp_path / "model", tmp_path / "weights", progress=lambda *report: seen.append(report), threads=3)
    )
    done = [done for done, _, _ in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1] == sum(file.raw(name).numel() for name in file.names)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    tensors = read_weights(tmp_path / "model")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    edit_weights(tmp_path / "model", tensors)
    with pytest.raises(ConversionError, match=r"lacks 1 tensor \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        convert(tmp_path / "model", tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_a_missing_expert_is_an_error(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path / "model", torch.bfloat16)
    tensors = read_weights(tmp_path / "model")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    edit_weights(tmp_path / "model", tensors)
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        convert(tmp_path / "model", tmp_path / "weights")


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    edit_weights(tmp_path / "model", read_weights(tmp_path / "model") | {"adapter.weight": torch.ones(2)})
    with pytest.raises(ConversionError, match=r"1 tensor \(adapter\.weight\) that LlamaForCausalLM does not know"):
        convert(tmp_path / "model", tmp_path / "weights")


def test_a_wrong_shape_names_file_and_both_shapes(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    edit_config(tmp_path / "model", intermediate_size=128)
    with pytest.raises(ConversionError, match=r"model\.safetensors: .*\[64, 128\] by config.json.*\[64, 96\]"):
        convert(tmp_path / "model", tmp_path / "weights")


def test_a_directory_without_config_or_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        convert(tmp_path, tmp_path / "weights")
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors\. Download"):
        convert(tmp_path / "model", tmp_path / "weights")
    (tmp_path / "model" / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="Convert its PyTorch files"):
        convert(tmp_path / "model", tmp_path / "weights")
    (tmp_path / "model" / "model-q4.gguf").touch()
    with pytest.raises(ModelError, match=r"gguf_file='model-q4\.gguf'"):
        convert(tmp_path / "model", tmp_path / "weights")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "single", torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    next((tmp_path / "model").glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of the .* files .*model-00002-of"):
        convert(tmp_path / "model", tmp_path / "weights")


def test_an_index_that_is_not_one_is_named(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": []}))
    with pytest.raises(ModelError, match="is not a safetensors index"):
        convert(tmp_path / "model", tmp_path / "weights")


def test_a_damaged_source_file_is_named(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    source = tmp_path / "model" / "model.safetensors"
    source.write_bytes(source.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        convert(tmp_path / "model", tmp_path / "weights")


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(WeightFileError, match="GiB free"):
        convert(tmp_path / "model", tmp_path / "out" / "weights")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "mixtral", "deepseek_v3", "kimi_k2", "gpt_oss"])
def test_export_gives_the_published_checkpoint_back(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model", torch.bfloat16)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights"))
    exported = read_weights(export_safetensors(file, tmp_path / "exported"))
    published = read_weights(tmp_path / "model")
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[key], tensor.to(exported[key].dtype)) for key, tensor in published.items())
    again = WeightFile(convert(tmp_path / "exported", tmp_path / "again"))
    assert all(again.checksum(weight) == file.checksum(weight) for weight in file.names)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_packed_weights_unpack_to_the_models_state_dict(name: str, tmp_path: Path, monkeypatch) -> None:
    state = save_tiny(name, tmp_path / "model", torch.bfloat16).state_dict()
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights", layout="packed"))
    packed = [weight for weight in file.names if file.get(weight).layout != "plain"]
    assert any("experts" in weight for weight in packed) or name == "llama_tied"
    assert "model.layers.0.self_attn.o_proj.weight" in packed
    assert not [weight for weight in packed if "kv_b_proj" in weight or "gate.w" in weight]
    assert ("model.embed_tokens.weight" in packed) == (name == "llama_tied")
    for weight, tensor in state.items():
        unpacked = unpack(file.get(weight))
        assert torch.equal(unpacked, tensor.to(unpacked.dtype)), weight
    assert verify(file.path) == []
    monkeypatch.setattr(pieces, "CHUNK_BYTES", 1)
    by_expert = WeightFile(convert(tmp_path / "model", tmp_path / "by_expert", layout="packed"))
    assert by_expert.header == file.header


def test_export_unpacks(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path / "model", torch.bfloat16)
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights", layout="packed"))
    exported, published = (read_weights(export_safetensors(file, tmp_path / "out")), read_weights(tmp_path / "model"))
    assert all(torch.equal(exported[key], tensor) for key, tensor in published.items())


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    with pytest.raises(ModelError, match="choose one of plain, packed"):
        convert(tmp_path / "model", tmp_path / "weights", layout="crumpled")
