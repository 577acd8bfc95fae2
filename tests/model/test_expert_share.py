"""The own experts of a rank, copied out of a weight file, in every layout that experts can have."""

import pytest
import torch

from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.dispatch.interface import expert_range
from hpcgen.memory.parameters import aligned
from hpcgen.model.causal import CausalModel
from hpcgen.model.conversion import convert
from hpcgen.model.expert_share import ExpertShare
from hpcgen.model.weight_file import WeightFile

from .checkpoints import save_fp8, save_mxfp4
from .tiny_models import save_tiny

STORED = {
    "plain": lambda directory: save_tiny("qwen3_moe", directory, torch.bfloat16),
    "packed": lambda directory: save_tiny("qwen3_moe", directory, torch.bfloat16),
    "fp8": lambda directory: save_fp8("deepseek_v3", directory, (8, 4)),
    "MXFP4": save_mxfp4,
}


@pytest.fixture(scope="module", params=STORED)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[WeightFile, CausalModel]:
    directory = tmp_path_factory.mktemp("share")
    STORED[request.param](directory / "model")
    layout = "packed" if request.param == "packed" else "plain"
    file = WeightFile(convert(directory / "model", directory / "weights", layout=layout))
    return file, CausalModel.build(directory / "model", getattr(torch, file.header.dtype), torch.device("cpu"))


def copied(share: ExpertShare, unit: str) -> torch.Tensor:
    """A buffer as a device has it."""
    buffer = torch.full((share.unit_bytes(unit),), 255, dtype=torch.uint8)
    offset = 0
    for piece in share.unit_pieces(unit):
        buffer[offset : offset + piece.numel()] = piece
        offset += aligned(piece.numel())
    assert offset == len(buffer)
    return buffer


@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_the_shares_of_all_ranks_are_the_whole_and_each_expert_is_on_one_rank(stored, ranks: int) -> None:
    file, model = stored
    experts = next(iter(model.experts))
    count = next(file.get(n).shape[0] for n in model.units[f"layer.{experts}"] if n.endswith("experts.down_proj"))
    shares = [ExpertShare(file, model, *expert_range(rank, ranks, count)) for rank in range(ranks)]
    for unit in model.units:
        views = [share.unit_views(unit, copied(share, unit)) for share in shares]
        for name in model.units[unit]:
            whole = dequantize(file.get(name), torch.float32)
            parts = [dequantize(view[name], torch.float32) for view in views]
            if ".experts." in name:
                torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)
            else:
                assert all(torch.equal(part, whole) for part in parts)
        for share, view in zip(shares, views, strict=True):
            share.prepare(unit, view).apply()
            if unit == f"layer.{experts}":
                bound = model.experts[experts].weights
                assert bound is not None and (bound.first, bound.count) == (share.first, share.count)
    if ranks > 1:
        sparse = f"layer.{experts}"
        assert shares[-1].unit_bytes(sparse) < file.unit_bytes(sparse)
