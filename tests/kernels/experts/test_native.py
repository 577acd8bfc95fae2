from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.kernels.experts.native import TOKENS_AT_ONCE, NativeExperts
from hpcgen.kernels.experts.torch_reference import TorchExperts
from tests.kernels.experts.layers import experts, in_fp32, packed, quantised, routing
from tests.kernels.libraries import every_isa, library_or_skip

REFERENCE = TorchExperts()
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "swiglu_oai"]


def relative_error(native, weights, hidden, index, weight):
    out = native.forward(packed(weights), hidden, index, weight)
    assert out.dtype == hidden.dtype
    expected = REFERENCE.forward(in_fp32(weights), hidden.float(), index, weight)
    return (out.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)


@every_isa
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 7, 100, 333])
def test_equals_the_reference(isa, activation, tokens):
    weights = experts(6, 96, 64, activation, bias=activation in ("gelu", "swiglu_oai"))
    hidden, (index, weight) = torch.randn(tokens, 96).bfloat16(), routing(tokens, 3, 6)
    assert relative_error(NativeExperts(library_or_skip(isa)), weights, hidden, index, weight) < 1e-2


@every_isa
def test_experts_of_other_ranks_add_nothing(isa):
    native = NativeExperts(library_or_skip(isa))
    everything = experts(8, 64, 32)
    hidden, (index, weight) = torch.randn(50, 64).bfloat16(), routing(50, 4, 8)
    share = replace(
        everything,
        gate_up=replace(everything.gate_up, data=everything.gate_up.data[2:5], shape=(3, 64, 64)),
        down=replace(everything.down, data=everything.down.data[2:5], shape=(3, 64, 32)),
        first=2,
    )
    alone = native.forward(packed(share), hidden, index, weight)
    masked = torch.where((index >= 2) & (index < 5), weight, 0.0)
    expected = REFERENCE.forward(in_fp32(everything), hidden.float(), index, masked)
    assert (alone.float() - expected).abs().max() < 1e-2 * expected.abs().max()
    assert relative_error(native, share, hidden, torch.full_like(index, 7), weight) == 0


@every_isa
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"], ids=["fp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [2, 70])
def test_quantised_weights_are_decoded_as_by_the_reference(isa, activation, tokens):
    weights = quantised(experts(5, 96, 160, activation))
    hidden, (index, weight) = torch.randn(tokens, 96).bfloat16(), routing(tokens, 3, 5)
    out = NativeExperts(library_or_skip(isa)).forward(weights, hidden, index, weight)
    expected = REFERENCE.forward(in_fp32(weights), hidden.float(), index, weight)
    assert (out.float() - expected).abs().max() < 1e-2 * expected.abs().max()


@every_isa
def test_nan_in_an_expert_that_no_token_uses_does_not_leak(isa):
    weights = experts(6, 64, 32)
    weights.gate_up.data[4] = float("nan")
    weights.down.data[4] = float("nan")
    hidden, (index, weight) = torch.randn(40, 64).bfloat16(), routing(40, 2, 4)
    out = NativeExperts(library_or_skip(isa)).forward(packed(weights), hidden, index, weight)
    assert out.isfinite().all()


def test_one_busy_expert_and_idle_ones_equal_the_reference():
    native = NativeExperts(library_or_skip("avx2"))
    hidden = torch.randn(400, 64).bfloat16()
    index, weight = torch.zeros(400, 1, dtype=torch.int64), torch.ones(400, 1)
    assert relative_error(native, experts(16, 64, 32), hidden, index, weight) < 1e-2


def test_no_tokens_give_no_rows():
    native = NativeExperts(library_or_skip("avx2"))
    index, weight = routing(0, 2, 4)
    out = native.forward(packed(experts(4, 64, 32)), torch.empty(0, 64, dtype=torch.bfloat16), index, weight)
    assert out.shape == (0, 64)


def test_more_tokens_than_are_taken_at_once_equal_the_reference():
    tokens = TOKENS_AT_ONCE + 3
    hidden, (index, weight) = torch.randn(tokens, 32).bfloat16(), routing(tokens, 1, 4)
    native = NativeExperts(library_or_skip("avx2"))
    assert relative_error(native, experts(4, 32, 32), hidden, index, weight) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_kernels_do_not_take_goes_to_torch(dtype):
    weights = experts(4, 64, 32, dtype=dtype)
    hidden, (index, weight) = torch.randn(10, 64).to(dtype), routing(10, 2, 4)
    native = NativeExperts(library_or_skip("avx2"))
    assert torch.equal(
        native.forward(weights, hidden, index, weight), REFERENCE.forward(weights, hidden, index, weight)
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_does_not_change_the_sum_of_one_share(threads):
    native = NativeExperts(library_or_skip("avx2"))
    weights = packed(experts(4, 1024, 32))
    hidden, (index, weight) = torch.randn(30, 1024).bfloat16(), routing(30, 2, 4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = native.forward(weights, hidden, index, weight)
        torch.set_num_threads(threads)
        assert torch.equal(native.forward(weights, hidden, index, weight), expected)
    finally:
        torch.set_num_threads(before)


@every_isa
@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 60),
    count=st.integers(1, 9),
    hidden=st.sampled_from([32, 64, 576]),
    intermediate=st.sampled_from([32, 96]),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    data=st.data(),
)
def test_any_shape_equals_the_reference(isa, tokens, count, hidden, intermediate, activation, bias, data):
    weights = experts(count, hidden, intermediate, activation, bias)
    top_k = data.draw(st.integers(1, count))
    x, (index, weight) = torch.randn(tokens, hidden).bfloat16(), routing(tokens, top_k, count)
    assert relative_error(NativeExperts(library_or_skip(isa)), weights, x, index, weight) < 2e-2
