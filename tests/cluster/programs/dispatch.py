"""Ranks with uneven tokens compute experts spread over them; each compares with all experts computed by itself."""

import torch

from hpcgen.cluster.dispatch import AlltoallvDispatcher
from hpcgen.cluster.expert_parallel import SpreadExperts
from hpcgen.cluster.watchdog import Watchdog
from hpcgen.cluster.world import open_world
from hpcgen.kernels.dispatch.interface import expert_range
from hpcgen.kernels.experts.interface import ExpertWeights
from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.kernels.layouts import StoredTensor

HIDDEN, INTERMEDIATE, SLOTS = 12, 8, 3


class OwnExpertsOnly(TorchExperts):
    """Refuses weights of experts that belong to other ranks."""

    def __init__(self, rank: int, ranks: int, experts: int) -> None:
        self.range = expert_range(rank, ranks, experts)

    def forward(self, weights, hidden, top_index, top_weight):
        assert (weights.first, weights.count) == self.range == (weights.first, len(weights.down.data))
        local = (top_index >= weights.first) & (top_index < weights.first + weights.count)
        assert local.any(1).all(), "a token came that has no expert here"
        return super().forward(weights, hidden, top_index, top_weight)


def weights(experts: int, dtype: torch.dtype) -> ExpertWeights:
    generator = torch.Generator().manual_seed(experts)

    def stored(*shape: int) -> StoredTensor:
        return StoredTensor(torch.randn(shape, generator=generator).to(dtype), shape)

    return ExpertWeights(
        stored(experts, 2 * INTERMEDIATE, HIDDEN), stored(experts, HIDDEN, INTERMEDIATE),
        torch.randn(experts, 2 * INTERMEDIATE, generator=generator).to(dtype), None, False, False, "silu",
    )  # fmt: skip


def main() -> None:
    with open_world() as world:
        assert world.comm is not None
        # 5 experts do not divide by any number of ranks; 2 are fewer than three ranks.
        for experts, dtype in [(5, torch.float32), (8, torch.bfloat16), (3, torch.float32)]:
            whole = weights(experts, dtype)
            own = OwnExpertsOnly(world.rank, world.size, experts)
            watchdog = Watchdog(world, None)
            dispatcher = AlltoallvDispatcher(world.comm, experts)
            spread = SpreadExperts(dispatcher, own, experts, world.rank, world.size, watchdog)
            for step in range(6):
                tokens = (world.rank * 7 + step * 3) % 5 if step else 0
                generator = torch.Generator().manual_seed(100 * step + world.rank)
                hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
                top_index = torch.rand(tokens, experts, generator=generator).topk(SLOTS).indices
                top_weight = torch.rand(tokens, SLOTS, generator=generator).to(dtype)
                found = spread.forward(whole, hidden, top_index, top_weight)
                expected = TorchExperts().forward(whole, hidden, top_index, top_weight)
                assert found.shape == hidden.shape and found.dtype == dtype
                tolerance = 1e-5 if dtype == torch.float32 else 0.15
                torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        if world.leads:
            print("same")


if __name__ == "__main__":
    main()
