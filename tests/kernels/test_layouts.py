import pytest
import torch

from hpcgen.kernels.layouts import PANELS, PANELS_TRANSPOSED, StoredTensor, choose_layout, pack, slice_expert, unpack

KINDS = {"linear": PANELS, "experts": PANELS, "experts-transposed": PANELS_TRANSPOSED}


@pytest.mark.parametrize("kind", KINDS)
def test_unpack_gives_back_the_bits_that_were_packed(kind):
    shape = (64, 96) if kind == "linear" else (3, 64, 96)
    plain = torch.randn(shape).bfloat16()
    stored = pack(plain, choose_layout(kind, shape, plain.dtype))
    assert stored.layout == KINDS[kind]
    assert stored.shape == shape
    assert stored.data.nbytes == plain.nbytes
    assert torch.equal(unpack(stored), plain)


@pytest.mark.parametrize("layout", ["plain", PANELS, PANELS_TRANSPOSED])
def test_a_slice_is_that_expert(layout):
    plain = torch.randn(4, 32, 64).bfloat16()
    assert torch.equal(unpack(slice_expert(pack(plain, layout), 2)), plain[2])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((33, 64), torch.bfloat16), ((64, 48), torch.bfloat16), ((64, 64), torch.float32)]
)
def test_what_does_not_divide_or_is_not_bf16_stays_plain(shape, dtype):
    assert choose_layout("linear", shape, dtype) == "plain"


def test_a_pair_along_k_lies_together():
    plain = torch.arange(32 * 32).view(32, 32)
    assert pack(plain, PANELS).data[0, 3, 5].tolist() == plain[5, 6:8].tolist()


def test_a_quantised_weight_has_no_unpacking():
    with pytest.raises(ValueError, match="mxfp4"):
        unpack(StoredTensor(torch.zeros(1), (1,), "mxfp4"))
