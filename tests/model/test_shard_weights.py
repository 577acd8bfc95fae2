"""A shard as a source of units for a device: the same parts as those that are bound directly."""

from pathlib import Path

import pytest
import torch

from hpcgen.memory.budget import DeviceBudget
from hpcgen.memory.parameters import ResidentUnits, StreamedParameters
from hpcgen.memory.streams import ThreadCopyStream
from hpcgen.model.causal import CausalModel
from hpcgen.model.conversion import convert
from hpcgen.model.shard_weights import ShardWeights
from hpcgen.model.tensor_parallel import TensorParallelShard
from hpcgen.model.weight_file import WeightFile

from .checkpoints import save_fp8
from .tiny_models import save_tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama in fp8", "qwen3_moe packed", "gpt_oss packed", "deepseek_v3"])
def test_parts_that_went_through_a_ring_are_those_of_the_shard(name: str, tmp_path: Path) -> None:
    family = name.split()[0]
    if "fp8" in name:
        save_fp8(family, tmp_path / "model", (32, 16))
    else:
        save_tiny(family, tmp_path / "model", torch.bfloat16)
    layout = "packed" if "packed" in name else "plain"
    file = WeightFile(convert(tmp_path / "model", tmp_path / "weights", dtype=torch.bfloat16, layout=layout))
    shard = TensorParallelShard(CausalModel.build(tmp_path / "model", torch.bfloat16, CPU), 1, 3)
    weights, stream, bound = ShardWeights(shard, file), ThreadCopyStream(), {}

    class Binder:
        def prepare(self, unit, tensors):
            class Bound:
                def apply(self) -> None:
                    weights.prepare(unit, tensors).apply()
                    bound[unit] = tensors

            return Bound()

        def unbind(self, unit) -> None:
            weights.unbind(unit)

    budget = DeviceBudget(None, CPU)
    resident = ResidentUnits(budget, stream)
    resident.load(weights, Binder(), ["embedding"])
    weights.keep(set(shard.model.units) - {"embedding"})
    ring = StreamedParameters(weights, Binder(), list(shard.model.units), resident, 2, budget, stream)
    for _ in range(2):
        for unit, names in shard.model.units.items():
            ring.require(unit)
            expected = shard.shard({weight: file.get(weight) for weight in names})
            for weight in names:
                found = bound[unit][weight]
                assert found.layout == expected[weight].layout and found.shape == expected[weight].shape
                assert torch.equal(found.data, expected[weight].data), weight
    stream.close()
