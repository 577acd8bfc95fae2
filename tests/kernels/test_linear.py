import pytest
import torch
from torch.nn import functional

from hpcgen.kernels import linear as module
from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.layouts import StoredTensor, choose_layout, pack
from hpcgen.kernels.linear import gated_mlp, linear, plain_linear
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


ALL_FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@every_isa
def test_fp8_weights_are_decoded_bit_for_bit(use, isa):
    use(isa)
    finite = ALL_FP8[ALL_FP8.float().isfinite()]
    data = finite[torch.randint(len(finite), (64, 96))].clone()
    weight = StoredTensor(data, (64, 96), "fp8-block", torch.rand(2, 3), (32, 32))
    # One input at a time: every product is a weight.
    values = linear(torch.eye(96).bfloat16(), weight).T
    assert torch.equal(values, dequantize(weight, torch.bfloat16))


def test_a_nan_of_an_fp8_weight_stays_one(use):
    use("avx2")
    data = ALL_FP8[torch.full((32, 32), 0x7F)].clone()
    weight = StoredTensor(data, (32, 32), "fp8-block", torch.ones(1, 1), (32, 32))
    assert linear(torch.ones(1, 32).bfloat16(), weight).isnan().all()


def test_shapes_that_do_not_divide_go_to_torch(use):
    use("avx2")
    weight = StoredTensor(
        torch.randn(40, 48).to(torch.float8_e4m3fn), (40, 48), "fp8-block", torch.ones(1, 1), (128, 128)
    )
    x = torch.randn(3, 48).bfloat16()
    assert torch.equal(linear(x, weight), functional.linear(x, dequantize(weight, x.dtype)))


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
    x = torch.randn(4, 32)  # whole tiles: fewer rows are padded to them
    assert torch.equal(linear(x, weight), functional.linear(x, plain.float()))
    x = x.bfloat16()
    assert torch.equal(linear(x, StoredTensor(plain, (64, 32))), functional.linear(x, plain))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("columns", "inner"), [(64, 64), (97, 60), (400, 576)])
def test_a_row_in_fp32_does_not_depend_on_the_rows_beside_it(threads, columns, inner):
    weight, bias, x = torch.randn(columns, inner), torch.randn(columns), torch.randn(64, inner)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = plain_linear(x, weight, bias)
        for rows in (1, 2, 3, 5, 6, 13, 33):
            assert torch.equal(plain_linear(x[:rows], weight, bias), together[:rows])
            assert torch.equal(plain_linear(x[None, -rows:], weight, bias)[0], together[-rows:])
    finally:
        torch.set_num_threads(before)
    assert plain_linear(x[:0], weight).shape == (0, columns)
