"""From a published checkpoint through the weight file to logits: what transformers makes of the same directory.

Quantised weights stay so in the file and are decoded when they are used; transformers decodes them at load. Both give
the same numbers, so the tolerance in fp32 is that of plain weights, larger only as logits are.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.model.causal import CausalModel
from hpcgen.model.conversion.convert import convert
from hpcgen.model.weight_file import WeightFile

from .checkpoints import edit_config, save_fp8, save_mxfp4
from .paged import PagedRunner, run_plan
from .tiny_models import TINY, VOCABULARY, save_tiny

PLAN = [[40, 3, 65], [1, 1, 1], [30, 1, 0], [200, 200, 200]]


def tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (80, 7, 70)]


def our_logits(directory: Path, dtype: torch.dtype, layout: str = "plain") -> torch.Tensor:
    """Units are bound to copies of their byte ranges, as a streamed model's are."""
    file = directory / "model.weights"
    convert(directory, file, dtype=dtype, layout=layout)
    weights = WeightFile(file)
    model = CausalModel.build(directory, dtype, torch.device("cpu"), TorchExperts())
    assert list(model.units) == list(weights.units)
    for unit in model.units:
        model.bind(unit, weights.unit_views(unit, weights.bytes(*weights.unit_range(unit)).clone()))
    with torch.inference_mode():
        return torch.cat(run_plan(PagedRunner(model, 3), tokens(), PLAN)).float()


def their_logits(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    if dtype == torch.float32:
        model.float()  # Some versions leave MXFP4 weights, which bf16 holds exactly, in bf16.
    with torch.inference_mode():
        return torch.cat([model(sequence[None], use_cache=False).logits[0] for sequence in tokens()]).float()


@pytest.mark.parametrize("name", [name for name in TINY if name != "kimi_k2"])
def test_a_checkpoint_gives_the_logits_of_transformers(name, tmp_path):
    save_tiny(name, tmp_path, torch.float32)
    torch.testing.assert_close(
        our_logits(tmp_path, torch.float32), their_logits(tmp_path, torch.float32), atol=2e-5, rtol=0
    )


def test_a_checkpoint_of_kimi_k2_gives_the_logits_of_deepseek_v3(tmp_path):
    """transformers does not know the model type, so it reads the same directory as DeepSeek-V3's."""
    save_tiny("kimi_k2", tmp_path, torch.float32)
    found = our_logits(tmp_path, torch.float32)
    edit_config(tmp_path, model_type="deepseek_v3")
    torch.testing.assert_close(found, their_logits(tmp_path, torch.float32), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"])
def test_an_fp8_checkpoint_gives_the_logits_of_transformers(name, tmp_path):
    pytest.importorskip("accelerate")
    save_fp8(name, tmp_path, (32, 32))
    torch.testing.assert_close(
        our_logits(tmp_path, torch.float32), their_logits(tmp_path, torch.float32), atol=2e-5, rtol=0
    )


def test_an_mxfp4_checkpoint_gives_the_logits_of_transformers(tmp_path):
    pytest.importorskip("accelerate")
    save_mxfp4(tmp_path)
    expected = their_logits(tmp_path, torch.float32)
    torch.testing.assert_close(our_logits(tmp_path, torch.float32), expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_packed_weights_are_as_near_to_fp32_as_transformers_in_bf16(name, tmp_path):
    save_tiny(name, tmp_path, torch.bfloat16)
    exact, theirs = their_logits(tmp_path, torch.float32), their_logits(tmp_path, torch.bfloat16)
    ours = our_logits(tmp_path, torch.bfloat16, layout="packed")
    assert (ours - exact).abs().median() <= 1.25 * (theirs - exact).abs().median()
