import pytest
import torch

from hpcgen.kernels import select
from hpcgen.kernels.select import UnknownBackend, packs_weights, select_attention, select_experts

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(select, "native_library", lambda: None)


@pytest.fixture
def with_compiler(monkeypatch):
    monkeypatch.setattr(select, "native_library", object)


def test_the_cpu_gets_the_native_kernels(with_compiler):
    assert select_attention(CPU, BF16).name == "native"
    assert select_experts(CPU, BF16).name == "native"
    assert packs_weights(CPU, BF16)


def test_torch_computes_where_nothing_can_be_built(without_compiler):
    assert select_attention(CPU, BF16).name == "torch"
    assert select_experts(CPU, BF16).name == "torch"
    assert not packs_weights(CPU, BF16)


def test_a_name_overrides_the_choice(with_compiler):
    assert select_attention(CPU, BF16, "torch").name == "torch"
    assert select_experts(CPU, BF16, "torch").name == "torch"
    assert select_experts(CPU, BF16, "grouped").name == "grouped"


def test_dtypes_that_the_kernels_lack_go_to_torch(with_compiler):
    assert select_attention(CPU, torch.float16).name == "torch"
    assert not packs_weights(CPU, torch.float32)


@pytest.mark.parametrize("name", ["nonsense", "native", "flashinfer"])
def test_a_backend_that_cannot_run_here_is_refused_with_a_remedy(without_compiler, name):
    with pytest.raises(UnknownBackend, match="'torch', which runs everywhere"):
        select_attention(CPU, BF16, name)


def test_cuda_without_flashinfer_gets_torch_attention_and_grouped_experts(monkeypatch):
    def no_module(name):
        raise ImportError(name)

    monkeypatch.setattr(select, "import_module", no_module)
    cuda = torch.device("cuda")
    assert select_attention(cuda, BF16).name == "torch"
    assert select_experts(cuda, BF16).name == "grouped"
