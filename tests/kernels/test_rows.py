import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hpcgen.kernels import rows as module
from hpcgen.kernels.rows import arg_max, norms_rows, rms_norm
from tests.kernels.libraries import every_isa, library_or_skip


@pytest.fixture
def use(monkeypatch):
    def use_isa(name):
        library = library_or_skip(name)
        monkeypatch.setattr(module, "native_library", lambda: library)

    return use_isa


@every_isa
@pytest.mark.parametrize("rows", [0, 1, 3, 130])
@pytest.mark.parametrize("width", [32, 576, 4096])
def test_a_norm_is_that_of_transformers(use, isa, rows, width):
    use(isa)
    norm = LlamaRMSNorm(width, 1e-5).bfloat16()
    norm.weight.data.normal_(1, 0.3)
    x = torch.randn(rows, width).mul(3).bfloat16()
    torch.testing.assert_close(rms_norm(x, norm.weight.data, 1e-5), norm(x).data, rtol=8e-3, atol=0)


def test_rows_that_are_not_contiguous_are_normed_as_they_lie(use):
    use("avx2")
    x, weight = torch.randn(5, 96).bfloat16(), torch.ones(32).bfloat16()
    assert torch.equal(rms_norm(x[:, 32:64], weight, 1e-5), rms_norm(x[:, 32:64].contiguous(), weight, 1e-5))


def test_norms_in_fp32_and_odd_widths_are_left_to_torch(use):
    use("avx2")
    assert norms_rows(torch.ones(1, 64).bfloat16(), torch.ones(64).bfloat16())
    assert not norms_rows(torch.ones(1, 64), torch.ones(64))
    assert not norms_rows(torch.ones(1, 64).bfloat16(), torch.ones(64))
    assert not norms_rows(torch.ones(1, 48).bfloat16(), torch.ones(48).bfloat16())


@every_isa
@pytest.mark.parametrize("width", [1, 255, 256, 1000, 49152])
def test_the_largest_is_the_first_that_torch_finds(use, isa, width):
    use(isa)
    logits = torch.randn(40, width).bfloat16()  # so coarse that the largest comes more than once
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert arg_max(logits).tolist() == expected


@every_isa
@pytest.mark.parametrize("place", [0, 300, 699])
def test_a_nan_is_the_largest_and_infinities_count(use, isa, place):
    use(isa)
    nan, low, high = torch.randn(3, 700).bfloat16()
    nan[699], nan[place] = float("inf"), float("nan")
    low[:], low[place] = -float("inf"), 0.0
    high[place] = float("inf")
    assert arg_max(torch.stack([nan, low, high])).tolist() == [place] * 3
    assert arg_max(torch.full((1, 700), -float("inf")).bfloat16()).tolist() == [0]


def test_logits_in_fp32_go_to_torch(use):
    use("avx2")
    assert arg_max(torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [1]
