import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcgen.kernels.attention.native import NativeAttention
from hpcgen.kernels.attention.torch_reference import TorchAttention
from tests.kernels.libraries import every_isa, library_or_skip
from tests.kernels.ragged import ragged

REFERENCE = TorchAttention()
DECODE = [(1, 1), (1, 64), (1, 65), (1, 500)]
PREFILL = [(1, 1), (64, 64), (130, 130), (65, 300)]
MIXED = [(5, 5), (0, 12), (70, 200), (1, 33), (20, 129)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def difference(attention, data, heads, dtype, window=None, sinks=None, scale=None):
    """Largest difference from the fp32 reference on the same rounded inputs."""
    data.fill(attention)
    width = data.kv.first.shape[3]
    query = torch.randn(len(data.new.positions), heads, width).to(dtype)
    scale = scale or width**-0.5
    out = attention.attend(query, data.kv, data.new, scale, window, sinks)
    assert out.dtype == dtype
    expected = REFERENCE.attend(query.float(), data.kv, data.new, scale, window, sinks)
    return (out.float() - expected).abs().max().item()


@every_isa
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sequences", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "value_width"),
    [
        (4, 4, 64, 64),
        (9, 3, 64, 64),
        (7, 1, 64, 96),
        (8, 1, 80, 80),
        (4, 2, 96, 96),
        (8, 2, 128, 128),
        (2, 1, 256, 256),
        (4, 1, 192, 128),
    ],
)
def test_equals_the_reference(isa, dtype, sequences, heads, groups, width, value_width):
    attention = NativeAttention(library_or_skip(isa))
    data = ragged(sequences, (groups, width), (groups, value_width), dtype)
    assert difference(attention, data, heads, dtype) < TOLERANCE[dtype]


@every_isa
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [1, 64, 100, 4000])
def test_sliding_window_and_sinks_equal_the_reference(isa, dtype, window):
    attention = NativeAttention(library_or_skip(isa))
    data = ragged(MIXED, (2, 64), (2, 64), dtype)
    assert difference(attention, data, 8, dtype, window, torch.randn(8)) < TOLERANCE[dtype]


@every_isa
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(4, 64, 16), (16, 512, 64), (130, 64, 32)])
def test_latent_attention_equals_the_reference(isa, dtype, heads, rank, rope):
    attention = NativeAttention(library_or_skip(isa))
    data = ragged(MIXED, (1, rank), (1, rope), dtype)
    data.fill(attention)
    tokens = len(data.new.positions)
    latent, rotary = torch.randn(tokens, heads, rank).to(dtype), torch.randn(tokens, heads, rope).to(dtype)
    scale = (rank + rope) ** -0.5
    out = attention.attend_latent(latent, rotary, data.kv, data.new, scale)
    expected = REFERENCE.attend_latent(latent.float(), rotary.float(), data.kv, data.new, scale)
    assert (out.float() - expected).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_long_context_split_over_threads_equals_the_reference(threads):
    attention = NativeAttention(library_or_skip("avx2"))
    data = ragged([(1, 3000), (2, 40)], (2, 64), (2, 64), torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert difference(attention, data, 4, torch.float32, None, torch.randn(4)) < TOLERANCE[torch.float32]
    finally:
        torch.set_num_threads(before)


def test_large_scores_do_not_overflow():
    attention = NativeAttention(library_or_skip("avx2"))
    data = ragged(MIXED, (1, 64), (1, 64), torch.float32)
    assert difference(attention, data, 2, torch.float32, scale=50.0) < 1e-4


@every_isa
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sequences=st.lists(
        st.integers(1, 200).flatmap(lambda context: st.tuples(st.integers(0, context), st.just(context))),
        min_size=1,
        max_size=5,
    ).filter(lambda s: any(new for new, _ in s)),
    groups=st.integers(1, 3),
    heads_per_group=st.integers(1, 9),
    width=st.sampled_from([16, 48, 64]),
    window=st.none() | st.integers(1, 150),
    has_sinks=st.booleans(),
)
def test_any_ragged_batch_equals_the_reference(isa, sequences, groups, heads_per_group, width, window, has_sinks):
    attention = NativeAttention(library_or_skip(isa))
    data = ragged(sequences, (groups, width), (groups, width), torch.bfloat16)
    sinks = torch.randn(groups * heads_per_group) if has_sinks else None
    assert difference(attention, data, groups * heads_per_group, torch.bfloat16, window, sinks) < 3e-2


def test_an_empty_batch_gives_an_empty_result():
    attention = NativeAttention(library_or_skip("avx2"))
    data = ragged([], (1, 64), (1, 64), torch.bfloat16)
    query = torch.empty(0, 2, 64, dtype=torch.bfloat16)
    assert attention.attend(query, data.kv, data.new, 1.0).shape == (0, 2, 64)


def test_write_equals_the_reference_bit_for_bit():
    data, same = (ragged(MIXED, (2, 64), (2, 80), torch.bfloat16) for _ in range(2))
    data.fill(NativeAttention(library_or_skip("avx2")))
    same.fill(REFERENCE)
    assert torch.equal(data.raw.view(torch.int16), same.raw.view(torch.int16))


def test_queries_of_another_dtype_than_the_pages_are_refused():
    attention = NativeAttention(library_or_skip("avx2"))
    data = ragged([(1, 1)], (1, 64), (1, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="one dtype"):
        attention.attend(torch.zeros(1, 1, 64), data.kv, data.new, 1.0)
