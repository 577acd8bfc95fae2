import pytest
import torch
from torch.nn import functional

from hpcgen.kernels.attention.torch_reference import TorchAttention
from tests.kernels.ragged import ragged

SEQUENCES = [(5, 5), (70, 200), (1, 33), (1, 64), (300, 300)]


def dense(data, query, heads, window=None, sinks=None):
    """Each sequence by torch's own attention over keys and values as they were written, [context, G, D]."""
    outs = []
    offsets = data.new.query_offsets.tolist()
    for b, context in enumerate(data.new.context_lengths.tolist()):
        pages = data.new.page_table[b, : -(-context // 64)].long()
        key, value = (p[pages].flatten(0, 1)[:context].float().transpose(0, 1) for p in data.kv)
        key, value = (t.repeat_interleave(heads // len(t), 0) for t in (key, value))
        q = query[offsets[b] : offsets[b + 1]].float().transpose(0, 1)
        position = torch.arange(context - q.shape[1], context)[:, None]
        mask = torch.arange(context) <= position
        if window:
            mask &= torch.arange(context) > position - window
        bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")).expand(heads, -1, -1)
        if sinks is not None:
            bias = torch.cat([bias, sinks.view(-1, 1, 1).expand(-1, len(position), 1)], -1)
            key = torch.cat([key, torch.zeros(heads, 1, key.shape[2])], 1)
            value = torch.cat([value, torch.zeros(heads, 1, value.shape[2])], 1)
        outs.append(functional.scaled_dot_product_attention(q, key, value, attn_mask=bias, scale=0.2).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_ragged_batch_equals_dense_attention_of_each_sequence(window, has_sinks):
    data = ragged(SEQUENCES, (2, 16), (2, 24), torch.float32)
    data.fill(TorchAttention())
    query = torch.randn(len(data.new.positions), 6, 16)
    sinks = torch.randn(6) if has_sinks else None
    out = TorchAttention().attend(query, data.kv, data.new, 0.2, window, sinks)
    torch.testing.assert_close(out, dense(data, query, 6, window, sinks), rtol=1e-5, atol=1e-5)


def test_latent_attention_equals_attention_with_the_concatenated_key():
    data = ragged(SEQUENCES, (1, 32), (1, 8), torch.float32)
    data.fill(TorchAttention())
    latent, rope = torch.randn(len(data.new.positions), 4, 32), torch.randn(len(data.new.positions), 4, 8)
    out = TorchAttention().attend_latent(latent, rope, data.kv, data.new, 0.2)
    data.kv = type(data.kv)(torch.cat(data.kv, -1), data.kv.first)
    torch.testing.assert_close(out, dense(data, torch.cat([latent, rope], -1), 4), rtol=1e-5, atol=1e-5)


def test_write_changes_only_the_slots_of_the_new_tokens():
    data = ragged([(3, 70)], (2, 16), (2, 16), torch.bfloat16)
    data.fill(TorchAttention())
    before = data.raw.clone()
    TorchAttention().write(data.kv, torch.ones(3, 2, 16), torch.ones(3, 2, 16), data.new)
    changed = (data.raw != before) & ~(data.raw.isnan() & before.isnan())
    assert changed.sum() == 2 * 3 * 2 * 16
    assert (data.raw[changed] == 1).all()
