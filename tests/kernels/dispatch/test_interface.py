import pytest
import torch

from hpcgen.kernels.dispatch.interface import expert_range
from hpcgen.kernels.dispatch.local import LocalDispatcher


@pytest.mark.parametrize(("ranks", "experts"), [(1, 7), (3, 7), (4, 8), (5, 3)])
def test_every_expert_has_one_owner_and_shares_differ_by_at_most_one(ranks, experts):
    ranges = [expert_range(rank, ranks, experts) for rank in range(ranks)]
    owned = [e for first, count in ranges for e in range(first, first + count)]
    assert owned == list(range(experts))
    counts = [count for _, count in ranges]
    assert max(counts) - min(counts) <= 1


def test_local_dispatch_and_combine_change_nothing():
    hidden = torch.randn(3, 8)
    dispatched = LocalDispatcher().dispatch(hidden, torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    assert dispatched.hidden is hidden
    assert LocalDispatcher().combine(hidden, dispatched.handle) is hidden
