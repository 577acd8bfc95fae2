"""A weight file fits the model that is built from the same directory: units, names and order, in every layout."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.model.causal import CausalModel
from hpcgen.model.conversion import convert
from hpcgen.model.weight_file import WeightFile

from .checkpoints import save_fp8, save_mxfp4
from .paged import PagedRunner, run_plan
from .tiny_models import TINY, VOCABULARY, save_tiny


def bound_to(directory: Path, file: WeightFile) -> CausalModel:
    dtype = getattr(torch, file.header.dtype)
    model = CausalModel.build(directory, dtype, torch.device("cpu"), TorchExperts())
    assert {unit: list(names) for unit, names in file.units.items()} == model.units
    assert list(file.units) == list(model.units)
    for unit in model.units:
        start, stop = file.unit_range(unit)
        model.bind(unit, file.unit_views(unit, file.bytes(start, stop)))
    return model


@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("name", TINY)
def test_every_unit_of_every_family_binds(name: str, layout: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model", torch.bfloat16)
    bound_to(tmp_path / "model", WeightFile(convert(tmp_path / "model", tmp_path / "weights", layout=layout)))


QUANTISED = {
    "llama in fp8": lambda directory: save_fp8("llama", directory, (32, 16)),
    "qwen3_moe in fp8": lambda directory: save_fp8("qwen3_moe", directory, (16, 16)),
    "deepseek_v2 in fp8": lambda directory: save_fp8("deepseek_v2", directory, (8, 4)),
    "deepseek_v3 in fp8": lambda directory: save_fp8("deepseek_v3", directory, (8, 4)),
    "gpt_oss in MXFP4": save_mxfp4,
}


@pytest.mark.parametrize("checkpoint", QUANTISED)
def test_fp32_logits_from_a_quantised_file_are_those_of_transformers(checkpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    QUANTISED[checkpoint](tmp_path / "model")
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights", dtype=torch.float32))
    assert any(file.get(name).layout in ("fp8-block", "mxfp4") for name in file.names)
    runner = PagedRunner(bound_to(tmp_path / "model", file), sequences=2)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, attn_implementation="eager"
    )
    reference.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (70, 11)]
    with torch.inference_mode():
        found = run_plan(runner, tokens, [[60, 5], [1, 1], [1, 0], [8, 5]])
        for sequence, logits in zip(tokens, found, strict=True):
            expected = reference.eval()(sequence[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


def test_fp8_blocks_that_divide_nothing_bind(tmp_path: Path) -> None:
    save_fp8("deepseek_v3", tmp_path / "model", (20, 24))
    bound_to(tmp_path / "model", WeightFile(convert(tmp_path / "model", tmp_path / "weights")))
