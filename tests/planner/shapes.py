"""Models and machines that the tests plan for."""

from pathlib import Path

import numpy as np

from hpcgen.planner.costs import Costs
from hpcgen.planner.hardware import Hardware, load_cluster
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.workload import Workload, draw

PUBLISHED = Path(__file__).parent.parent.parent / "configs" / "published"

LLAMA = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_MOE = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def llama() -> ModelShape:
    return ModelShape.from_config(LLAMA, "llama")


def qwen3_moe() -> ModelShape:
    return ModelShape.from_config(QWEN3_MOE, "qwen3-moe")


def deepseek() -> ModelShape:
    return ModelShape.read(PUBLISHED / "deepseek_r1.json")


def machine(shape: ModelShape, cluster: str) -> tuple[Costs, Hardware]:
    hardware = load_cluster(cluster)
    return Costs.from_hardware(shape, hardware), hardware


def long_tailed(count: int, prompt: int = 200, output: int = 200, seed: int = 0) -> Workload:
    outputs = draw(f"lognormal:{output}:1.0:{8 * output}", count, seed + 1)
    return Workload.of(draw(f"lognormal:{prompt}:0.5", count, seed), outputs, np.full(count, 8 * output))
