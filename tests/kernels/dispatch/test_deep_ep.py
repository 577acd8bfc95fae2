"""Our calls against the signatures of the pinned release, over a buffer of several ranks in one process."""

from types import SimpleNamespace

import pytest
import torch

from hpcgen.errors import HpcgenError
from hpcgen.kernels.dispatch.deep_ep import DeepEPDispatcher
from hpcgen.kernels.dispatch.interface import expert_range
from tests.kernels.signatures.fakes import bound

CLASS = "deep_ep.ElasticBuffer"


class Buffer:
    """What one rank of DeepEP would receive of its own tokens: those with an expert here, numbered from 0."""

    def __init__(self, *args, **kwargs):
        self.made = bound(CLASS, "__init__", *args, **kwargs)
        self.destroyed = False

    def dispatch(self, *args, **kwargs):
        call = bound(CLASS, "dispatch", *args, **kwargs)
        assert call.x.dtype == torch.bfloat16
        assert call.topk_weights.dtype == torch.float32
        assert call.num_experts % self.made.group.size() == 0
        share = call.num_experts // self.made.group.size()
        index = call.topk_idx - self.made.group.rank() * share
        index = torch.where((index >= 0) & (index < share), index, -1)
        mine = (index >= 0).any(1)
        return call.x[mine], index[mine], call.topk_weights[mine], mine, SimpleNamespace()

    def combine(self, *args, **kwargs):
        call = bound(CLASS, "combine", *args, **kwargs)
        combined = torch.zeros(len(call.handle), call.x.shape[1], dtype=call.x.dtype)
        combined[call.handle] = call.x
        return combined, None, SimpleNamespace()

    def destroy(self):
        assert self.made.explicitly_destroy
        self.destroyed = True


def dispatcher(rank, ranks, experts, max_tokens=64):
    group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
    fake = SimpleNamespace(ElasticBuffer=Buffer, topk_idx_t=torch.int64)
    return DeepEPDispatcher(fake, group, experts, max_tokens, hidden=16, top_k=2, device=torch.device("cpu"))


@pytest.mark.parametrize(("ranks", "experts"), [(1, 4), (2, 6), (3, 7), (4, 5)])
def test_every_rank_gets_the_tokens_of_its_experts_under_their_global_numbers(ranks, experts):
    hidden, index = torch.randn(20, 16).bfloat16(), torch.rand(20, experts).argsort(1)[:, :2]
    weight = torch.rand(20, 2)
    seen = torch.zeros(20, 2)
    for rank in range(ranks):
        first, count = expert_range(rank, ranks, experts)
        got = dispatcher(rank, ranks, experts).dispatch(hidden, index, weight)
        mine = ((index >= first) & (index < first + count)).any(1)
        assert torch.equal(got.hidden, hidden[mine])
        local = (got.top_index >= first) & (got.top_index < first + count)
        assert torch.equal(got.top_index[local], index[mine][local])
        assert (got.top_index[~local] == -1).all()
        assert torch.equal(got.top_weight, weight[mine])
        seen[mine] += local
    assert (seen == 1).all()


def test_combine_gives_rows_back_in_the_order_of_the_tokens():
    rank = dispatcher(1, 2, 4)
    hidden, index = torch.randn(6, 16).bfloat16(), torch.tensor([[0, 1], [2, 3], [0, 2], [1, 0], [3, 0], [1, 2]])
    got = rank.dispatch(hidden, index, torch.rand(6, 2))
    out = rank.combine(got.hidden, got.handle)
    here = (index >= 2).any(1)
    assert torch.equal(out[here], hidden[here])
    assert (out[~here] == 0).all()


def test_a_rank_without_tokens_takes_part():
    got = dispatcher(0, 2, 4).dispatch(
        torch.empty(0, 16).bfloat16(), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    )
    assert got.hidden.shape == (0, 16)


def test_more_tokens_than_the_buffer_holds_are_refused():
    with pytest.raises(ValueError, match="made for 4"):
        dispatcher(0, 1, 4, max_tokens=4).dispatch(
            torch.zeros(5, 16).bfloat16(), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
        )


def test_fp32_tokens_are_refused_with_the_remedy():
    with pytest.raises(HpcgenError, match="--dtype bfloat16"):
        dispatcher(0, 1, 4).dispatch(torch.zeros(1, 16), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))


def test_close_releases_the_buffer():
    rank = dispatcher(0, 1, 4)
    rank.close()
    assert rank._buffer.destroyed
