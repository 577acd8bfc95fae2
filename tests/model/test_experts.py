"""The experts function: what a backend is given, and which experts are refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from hpcgen.kernels.experts.interface import ExpertWeights
from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.model.errors import ModelError
from hpcgen.model.experts import attach, is_experts_module

from .paged import PagedRunner, bound_model
from .tiny_models import TINY, build_tiny


class RecordingExperts(TorchExperts):
    def __init__(self) -> None:
        self.calls: list[tuple[ExpertWeights, torch.Tensor]] = []

    def forward(self, weights, hidden, top_index, top_weight):
        self.calls.append((weights, top_index))
        return super().forward(weights, hidden, top_index, top_weight)


def run(model) -> torch.Tensor:
    with torch.inference_mode():
        return PagedRunner(model, 1).run({0: torch.tensor([3, 4, 5])})[0]


@pytest.mark.parametrize(
    ("name", "sparse"),
    [
        ("llama", []),
        ("qwen3_moe", [0, 1, 2]),
        ("mixtral", [0, 1, 2]),
        ("deepseek_v3", [1, 2]),
        ("gpt_oss", [0, 1, 2, 3]),
    ],
)
def test_sparse_layers_are_found(name, sparse):
    model = bound_model(build_tiny(name, torch.float32), TINY[name][0], torch.float32)
    assert list(model.experts) == sparse


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_an_exchanged_backend_computes_every_sparse_layer(name):
    model = bound_model(build_tiny(name, torch.float32), TINY[name][0], torch.float32)
    expected = run(model)
    model.experts_backend = recording = RecordingExperts()
    assert torch.equal(run(model), expected)
    assert len(recording.calls) == len(model.experts)
    assert all(index.dtype == torch.int64 and index.shape[0] == 3 for _, index in recording.calls)


def test_ranks_that_hold_a_part_of_the_experts_each_add_up_to_all():
    model = bound_model(build_tiny("qwen3_moe", torch.float32), "qwen3_moe", torch.float32)
    whole = model.experts[0].weights
    hidden, index, weight = torch.randn(5, 64), torch.randint(0, 8, (5, 2)), torch.rand(5, 2)
    expected = TorchExperts().forward(whole, hidden, index, weight)
    total = torch.zeros_like(expected)
    for first, stop in ((0, 3), (3, 8)):
        stored = {"gate_up_proj": whole.gate_up, "down_proj": whole.down}
        part = {
            name: type(tensor)(tensor.data[first:stop], (stop - first, *tensor.shape[1:]))
            for name, tensor in stored.items()
        }
        total += TorchExperts().forward(model.experts[0].weights_of(part, first), hidden, index, weight)
    torch.testing.assert_close(total, expected)


def test_the_layout_of_gpt_oss_is_told_to_the_backend():
    weights = bound_model(build_tiny("gpt_oss", torch.float32), "gpt_oss", torch.float32).experts[0].weights
    assert (weights.transposed, weights.interleaved, weights.activation) == (True, True, "swiglu_oai")
    assert (weights.alpha, weights.limit) == (1.702, 7.0)
    assert weights.gate_up_bias.shape == (8, 64)
    assert weights.down_bias.shape == (8, 64)


class OtherExperts(nn.Module):
    """Experts as `use_experts_implementation` leaves them."""

    def __init__(self, **flags):
        super().__init__()
        defaults = {"has_gate": True, "has_post_expert_norm": False, "is_transposed": False, "is_concatenated": True}
        self.__dict__.update({**defaults, **flags})

    def _apply_gate(self, gate_up):
        return gate_up


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"has_gate": False}, "without a gate"),
        ({"has_post_expert_norm": True}, "a norm"),
        ({}, "an activation that the experts kernels do not compute"),
        ({"act_fn": ACT2FN["relu2"]}, "an activation that the experts kernels do not compute"),
    ],
)
def test_experts_that_the_kernels_do_not_compute_are_refused(flags, reason):
    module = OtherExperts(**flags)
    assert is_experts_module(module)
    with pytest.raises(ModelError, match=reason):
        attach(module, SimpleNamespace(experts_backend=TorchExperts()), 0)
