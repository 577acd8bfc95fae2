"""Our calls against the signatures of the pinned release, and what they mean, by wrappers that compute with torch."""

from types import SimpleNamespace

import pytest
import torch

from hpcgen.kernels.attention import flashinfer as module
from hpcgen.kernels.attention.flashinfer import FlashInferAttention, compress
from hpcgen.kernels.attention.interface import AttentionBatch, KVPages
from hpcgen.kernels.attention.torch_reference import TorchAttention
from tests.kernels.ragged import ragged
from tests.kernels.signatures.fakes import bound

REFERENCE = TorchAttention()
MIXED = [(5, 5), (70, 200), (1, 33), (20, 128)]
DECODE = [(1, 1), (1, 64), (1, 65)]


def batch_of(query_offsets, page_offsets, pages, last_page_tokens, page_tokens=64) -> AttentionBatch:
    """The batch that flashinfer would work on, from what it was told of it."""
    counts = page_offsets.diff().tolist()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, part in zip(table, pages.split(counts), strict=True):
        row[: len(part)] = part
    lengths = (page_offsets.diff() - 1) * page_tokens + last_page_tokens
    news = query_offsets.diff().tolist()
    positions = torch.cat([torch.arange(n - new, n) for n, new in zip(lengths.tolist(), news, strict=True)])
    return AttentionBatch(query_offsets, lengths.int(), table, positions, torch.empty(0))


class Wrapper:
    """A wrapper of flashinfer: `plan` and `run` bind as released, and compute with the reference."""

    class_name: str
    plan_method = "plan"
    plans = 0

    def __init__(self, *args, **kwargs):
        self.made = bound(self.class_name, "__init__", *args, **kwargs)

    def plan(self, *args, **kwargs):
        type(self).plans += 1
        self.planned = bound(self.class_name, self.plan_method, *args, **kwargs)
        assert self.planned.q_data_type == self.planned.kv_data_type == torch.bfloat16

    def attend(self, query, cache, query_offsets, indptr, indices, last, sinks=None):
        window = self.planned.window_left
        batch = batch_of(query_offsets, indptr, indices, last, self.planned.page_size)
        kv = KVPages(*cache)
        return REFERENCE.attend(query, kv, batch, self.planned.sm_scale, None if window < 0 else window + 1, sinks)


class Prefill(Wrapper):
    class_name = "flashinfer.BatchPrefillWithPagedKVCacheWrapper"

    def run(self, *args, **kwargs):
        call, plan = bound(Prefill.class_name, "run", *args, **kwargs), self.planned
        assert plan.causal is True
        sinks = None
        if call.args:
            sinks, scale = call.args
            assert sinks.dtype == torch.float32
            assert scale == plan.sm_scale
        rows = (plan.qo_indptr, plan.paged_kv_indptr, plan.paged_kv_indices, plan.paged_kv_last_page_len)
        return self.attend(call.q, call.paged_kv_cache, *rows, sinks)


class Sinks(Prefill):
    class_name = "flashinfer.BatchAttentionWithAttentionSinkWrapper"

    def plan(self, *args, **kwargs):
        type(self).plans += 1
        self.planned = bound(Prefill.class_name, "plan", *args, **kwargs)
        assert self.made.window_left == self.planned.window_left
        assert self.made.q_data_type == self.planned.q_data_type


class Decode(Wrapper):
    class_name = "flashinfer.BatchDecodeWithPagedKVCacheWrapper"
    plan_method = "_plan_impl"

    def run(self, *args, **kwargs):
        call, plan = bound(self.class_name, "run", *args, **kwargs), self.planned
        one_each = torch.arange(len(call.q) + 1, dtype=torch.int32)
        return self.attend(call.q, call.paged_kv_cache, one_each, plan.indptr, plan.indices, plan.last_page_len)


class Latent(Wrapper):
    class_name = "flashinfer.mla.BatchMLAPagedAttentionWrapper"

    def run(self, *args, **kwargs):
        call, plan = bound(self.class_name, "run", *args, **kwargs), self.planned
        rows = plan.metadata
        last = (rows.kv_len_arr - 1) % plan.page_size + 1
        batch = batch_of(rows.qo_indptr, rows.kv_indptr, rows.kv_indices, last)
        assert torch.equal(batch.context_lengths, rows.kv_len_arr)
        latent, rope = (cache.unsqueeze(2) for cache in call.kv_cache)
        return REFERENCE.attend_latent(*call.query, KVPages(latent, rope), batch, plan.sm_scale)


@pytest.fixture
def attention():
    for wrapper in (Prefill, Decode, Sinks, Latent):
        wrapper.plans = 0
    csr = lambda **rows: bound("flashinfer.mla.MLAPlanMetadata", "csr", **rows)  # noqa: E731
    fake = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchAttentionWithAttentionSinkWrapper=Sinks,
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=Latent, MLAPlanMetadata=SimpleNamespace(csr=csr)),
    )
    return FlashInferAttention(fake, torch.device("cpu"))


@pytest.mark.parametrize("sequences", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_what_flashinfer_is_told_is_what_was_asked(attention, sequences, window, has_sinks):
    data = ragged(sequences, (2, 64), (2, 64), torch.bfloat16)
    data.fill(attention)
    query = torch.randn(len(data.new.positions), 8, 64).bfloat16()
    sinks = torch.randn(8).bfloat16() if has_sinks else None
    attention.plan(data.new)
    out = attention.attend(query, data.kv, data.new, 0.1, window, sinks)
    assert torch.equal(out, REFERENCE.attend(query, data.kv, data.new, 0.1, window, sinks))
    used = Sinks if has_sinks else Decode if sequences is DECODE else Prefill
    assert [wrapper.plans for wrapper in (Prefill, Decode, Sinks)] == [
        wrapper is used for wrapper in (Prefill, Decode, Sinks)
    ]


def test_latent_attention_is_told_what_was_asked(attention):
    data = ragged(MIXED, (1, 512), (1, 64), torch.bfloat16)
    data.fill(attention)
    latent, rope = (torch.randn(len(data.new.positions), 3, width).bfloat16() for width in (512, 64))
    out = attention.attend_latent(latent, rope, data.kv, data.new, 0.05)
    assert torch.equal(out, REFERENCE.attend_latent(latent, rope, data.kv, data.new, 0.05))
    assert Latent.plans == 1


def test_latents_of_other_widths_go_to_torch(attention):
    data = ragged(DECODE, (1, 32), (1, 8), torch.bfloat16)
    data.fill(attention)
    attention.attend_latent(torch.randn(3, 2, 32).bfloat16(), torch.randn(3, 2, 8).bfloat16(), data.kv, data.new, 1.0)
    assert Latent.plans == 0


def test_layers_of_one_kind_share_a_plan_and_a_new_batch_makes_a_new_one(attention):
    data = ragged(DECODE, (2, 64), (2, 64), torch.bfloat16)
    data.fill(attention)
    query = torch.randn(3, 4, 64).bfloat16()
    for step in (1, 2):
        attention.plan(data.new)
        for _layer in range(3):
            attention.attend(query, data.kv, data.new, 0.1)
        assert Decode.plans == step
    attention.attend(query, data.kv, data.new, 0.1, sliding_window=8)
    assert Decode.plans == 3


def test_compressed_rows_hold_the_used_pages_only():
    batch = ragged([(1, 130), (1, 64)], (1, 64), (1, 64), torch.bfloat16).new
    rows = compress(batch, 64)
    assert rows.page_offsets.tolist() == [0, 3, 4]
    assert rows.pages.tolist() == [*batch.page_table[0].tolist(), batch.page_table[1, 0].item()]
    assert rows.last_page_tokens.tolist() == [2, 64]


def test_the_workspace_is_shared(attention):
    data = ragged(DECODE, (2, 64), (2, 64), torch.bfloat16)
    data.fill(attention)
    for heads in (2, 8):
        attention.attend(torch.randn(3, heads, 64).bfloat16(), data.kv, data.new, 0.1)
    workspaces = {wrapper.made.float_workspace_buffer.data_ptr() for wrapper in attention._wrappers.values()}
    assert len(workspaces) == 1
    assert attention._workspace.numel() == module.WORKSPACE_BYTES
