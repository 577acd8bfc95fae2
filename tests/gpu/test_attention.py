import dataclasses

import pytest
import torch

from hpcgen.kernels.attention.interface import KVPages
from hpcgen.kernels.attention.torch_reference import TorchAttention
from hpcgen.kernels.select import select_attention
from tests.kernels.ragged import ragged

pytestmark = pytest.mark.gpu

MIXED = [(5, 5), (70, 200), (1, 33), (1, 64), (300, 300)]
DECODE = [(1, 1), (1, 64), (1, 65), (1, 700)]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def on_device(data, device):
    """The batch and the KV of `data` on the device; lengths and offsets stay on the CPU."""
    batch = data.new
    moved = {name: getattr(batch, name).to(device) for name in ("page_table", "positions", "slots")}
    # A page of all layers is one row: the views must keep their stride over pages.
    raw = data.raw.to(device)
    kv = KVPages(*(raw.as_strided(view.shape, view.stride(), view.storage_offset()) for view in data.kv))
    return kv, dataclasses.replace(batch, **moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequences", [MIXED, DECODE])
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_paged_attention_equals_that_of_the_cpu(cuda, dtype, sequences, window, has_sinks):
    data = ragged(sequences, (2, 64), (2, 64), dtype)
    data.fill(TorchAttention())
    query = torch.randn(len(data.new.positions), 8, 64).to(dtype)
    sinks = torch.randn(8).to(dtype) if has_sinks else None
    expected = TorchAttention().attend(query, data.kv, data.new, 0.125, window, sinks)
    kv, batch = on_device(data, cuda)
    backend = select_attention(cuda, dtype)
    backend.plan(batch)
    out = backend.attend(query.to(cuda), kv, batch, 0.125, window, sinks.to(cuda) if has_sinks else None)
    torch.testing.assert_close(out.cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("sequences", [MIXED, DECODE])
def test_latent_attention_of_deepseek_equals_that_of_the_cpu(cuda, sequences):
    data = ragged(sequences, (1, 512), (1, 64), torch.bfloat16)
    data.fill(TorchAttention())
    tokens = len(data.new.positions)
    latent, rope = torch.randn(tokens, 16, 512).bfloat16(), torch.randn(tokens, 16, 64).bfloat16()
    expected = TorchAttention().attend_latent(latent, rope, data.kv, data.new, 0.05)
    kv, batch = on_device(data, cuda)
    backend = select_attention(cuda, torch.bfloat16)
    backend.plan(batch)
    out = backend.attend_latent(latent.to(cuda), rope.to(cuda), kv, batch, 0.05)
    torch.testing.assert_close(out.cpu(), expected, rtol=3e-2, atol=3e-2)


def test_new_tokens_are_written_where_they_belong(cuda):
    data = ragged(MIXED, (2, 64), (2, 64), torch.bfloat16)
    data.fill(TorchAttention())
    kv, batch = on_device(data, cuda)
    first, second = (torch.randn(len(batch.positions), 2, 64).bfloat16() for _ in range(2))
    backend = select_attention(cuda, torch.bfloat16)
    backend.plan(batch)
    backend.write(kv, first.to(cuda), second.to(cuda), batch)
    TorchAttention().write(data.kv, first, second, data.new)
    for there, here in zip(kv, data.kv, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=0, atol=0, equal_nan=True)
