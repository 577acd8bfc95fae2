import pytest
import torch
from torch.nn import functional

from hpcgen.kernels import linear as module
from hpcgen.kernels.layouts import StoredTensor, choose_layout, pack
from hpcgen.kernels.linear import gated_mlp, linear
from tests.kernels.libraries import every_isa, library_or_skip


@pytest.fixture
def use(monkeypatch):
    def use_isa(name):
        library = library_or_skip(name)
        monkeypatch.setattr(module, "native_library", lambda: library)

    return use_isa


def stored(rows, columns):
    plain = (torch.randn(rows, columns) * columns**-0.5).bfloat16()
    return plain, pack(plain, choose_layout("linear", (rows, columns), plain.dtype))


@every_isa
@pytest.mark.parametrize("rows", [1, 2, 13, 16, 17, 33, 200])
@pytest.mark.parametrize(("columns", "inner"), [(32, 32), (96, 576), (64, 1600)])
def test_equals_torch_in_fp32(use, isa, rows, columns, inner):
    use(isa)
    plain, weight = stored(columns, inner)
    x, bias = torch.randn(rows, inner).bfloat16(), torch.randn(columns).bfloat16()
    for b in (None, bias):
        expected = functional.linear(x.float(), plain.float(), None if b is None else b.float())
        torch.testing.assert_close(linear(x, weight, b).float(), expected, rtol=1e-2, atol=1e-2)


@every_isa
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_mlp_equals_its_three_layers(use, isa, rows, activation):
    use(isa)
    (gate, gate_p), (up, up_p), (down, down_p) = stored(96, 64), stored(96, 64), stored(64, 96)
    x = torch.randn(rows, 64).bfloat16()
    act = {"silu": functional.silu, "gelu": functional.gelu}.get(
        activation, lambda y: functional.gelu(y, approximate="tanh")
    )
    expected = (act(x.float() @ gate.float().T) * (x.float() @ up.float().T)) @ down.float().T
    out = gated_mlp(x, gate_p, up_p, down_p, activation).float()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_leading_dimensions_and_row_strides_are_kept(use):
    use("avx2")
    plain, weight = stored(64, 32)
    wide = torch.randn(2, 5, 96).bfloat16()
    x = wide[..., 32:64]
    assert linear(x, weight).shape == (2, 5, 64)
    torch.testing.assert_close(linear(x, weight), functional.linear(x, plain), rtol=1e-2, atol=1e-2)


def test_no_rows_give_no_rows(use):
    use("avx2")
    assert linear(torch.empty(0, 32, dtype=torch.bfloat16), stored(64, 32)[1]).shape == (0, 64)


def test_plain_weights_and_fp32_go_to_torch_bit_for_bit():
    plain, weight = stored(64, 32)
    x = torch.randn(3, 32)
    assert torch.equal(linear(x, weight), functional.linear(x, plain.float()))
    x = x.bfloat16()
    assert torch.equal(linear(x, StoredTensor(plain, (64, 32))), functional.linear(x, plain))
