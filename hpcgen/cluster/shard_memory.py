"""Where the shard of a PARTITION lies: in host memory beside the whole model, or in the budget of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from hpcgen.engine.build import EngineOptions, RankAssembly, activation_bytes
from hpcgen.memory.budget import DeviceBudget, OutOfDeviceMemory
from hpcgen.memory.device_plan import DeviceNeeds, PhaseMemory, divide_for_decode
from hpcgen.memory.parameters import Parameters, ResidentUnits, StreamedParameters
from hpcgen.memory.streams import CopyStream, open_copy_stream
from hpcgen.model.shard_weights import ShardWeights
from hpcgen.model.tensor_parallel import TensorParallelShard
from hpcgen.model.units import EMBEDDING, FINAL_NORM, HEAD, layer_unit
from hpcgen.model.weight_file import WeightFile
from hpcgen.sequence import pages_for

ShardMaker = Callable[[], TensorParallelShard]
"""Makes a definition of its own for the shard, when it is first needed."""


class ShardMemory(Protocol):
    """The shard, ready to run, and room for its part of one sequence's KV."""

    def open(self) -> TensorParallelShard:
        """The shard with its parameters; cheap where it is open."""

    def embed(self, token: int) -> torch.Tensor:
        """Hidden [1, D] of a token."""

    def pages(self, count: int) -> torch.Tensor:
        """uint8 [at least `count`, page_bytes of the shard]; what was written to the first ones stays."""

    def close(self) -> None:
        """Others need the memory; what is in `pages` may be gone."""


class HostShard:
    """For a CPU without a budget: views of the weight file where that is possible, else copies, made once."""

    def __init__(self, make: ShardMaker, weights: WeightFile) -> None:
        self._make, self._weights = make, weights
        self._shard: TensorParallelShard | None = None
        self._pages = torch.empty(0, 0, dtype=torch.uint8)

    def open(self) -> TensorParallelShard:
        if self._shard is None:
            shard = self._shard = self._make()
            for unit, names in shard.model.units.items():
                shard.prepare(unit, {name: self._weights.get(name) for name in names}).apply()
        return self._shard

    def embed(self, token: int) -> torch.Tensor:
        return self.open().model.embed(torch.tensor([token]))

    def pages(self, count: int) -> torch.Tensor:
        if len(self._pages) < count:
            wider = torch.zeros(2 * count, self.open().kv_layout.page_bytes, dtype=torch.uint8)
            wider[: len(self._pages)] = self._pages.view(-1, wider.shape[1])
            self._pages = wider
        return self._pages

    def close(self) -> None:
        """It is in nobody's way."""


class BudgetedShard:
    """For a device with a budget that decode has given up: parameters resident or streamed, KV for one sequence."""

    def __init__(
        self, make: ShardMaker, weights: WeightFile, budget: DeviceBudget, memory: PhaseMemory, most_pages: int
    ) -> None:
        """`memory` has KV in pages, `most_pages` of them."""
        self._make, self._weights, self._budget, self._memory = make, weights, budget, memory
        self._most_pages = most_pages
        self._shard: TensorParallelShard | None = None
        self._stream: CopyStream | None = None
        self._resident: ResidentUnits | None = None
        self._parameters: Parameters | None = None
        self._pages = torch.empty(0, dtype=torch.uint8)

    def open(self) -> TensorParallelShard:
        if self._shard is None:
            self._shard = self._make()
            self._source = ShardWeights(self._shard, self._weights)
            self._source.keep(set(self._shard.model.units) - set(self._memory.resident))
            self._require_before_each_unit(self._shard)
        if self._parameters is None:
            model, memory = self._shard.model, self._memory
            self._stream = open_copy_stream(model.device)
            self._budget.reserve("activations", memory.activation_bytes)
            self._resident = ResidentUnits(self._budget, self._stream)
            self._resident.load(self._source, self._source, memory.resident)
            self._parameters = StreamedParameters(
                self._source, self._source, list(model.units), self._resident, memory.ring_slots, self._budget,
                self._stream,
            )  # fmt: skip
            self._pages = self._budget.buffer("KV", memory.kv_bytes).view(self._most_pages, -1)
        return self._shard

    def embed(self, token: int) -> torch.Tensor:
        model = self.open().model
        self._require(EMBEDDING)
        return model.embed(torch.tensor([token], device=model.device))

    def pages(self, count: int) -> torch.Tensor:
        return self._pages

    def close(self) -> None:
        if self._parameters is None:
            return
        assert self._stream is not None and self._resident is not None
        self._stream.close()
        self._resident.release_except(self._source, ())
        for purpose in ("ring buffer", "KV", "activations"):
            self._budget.release(purpose)
        self._parameters = self._resident = self._stream = None
        self._pages = torch.empty(0, dtype=torch.uint8)

    def _require(self, unit: str) -> None:
        assert self._parameters is not None
        self._parameters.require(unit)

    def _require_before_each_unit(self, shard: TensorParallelShard) -> None:
        model = shard.model
        for index in range(model.layers):
            _before(model.layer(index), self._require, layer_unit(index))
        head = HEAD if HEAD in model.units else EMBEDDING
        _before(model.module.get_submodule(model.family.head), self._require, head)


def _before(module: nn.Module, require: Callable[[str], None], unit: str) -> None:
    module.register_forward_pre_hook(lambda *_: require(unit))


def plan_shard(
    rank: RankAssembly, make: ShardMaker, weights: WeightFile, options: EngineOptions, part: TensorParallelShard
) -> ShardMemory | None:
    """How this rank is to hold `part`, its shard seen in the whole model; None where its device has no room for it."""
    if rank.budget.limit is None:
        return HostShard(make, weights)
    source, most_pages = ShardWeights(part, weights), pages_for(options.max_model_len)
    needs = DeviceNeeds(
        unit_bytes={unit: source.unit_bytes(unit) for unit in part.model.units},
        always_resident=(FINAL_NORM,),
        layout=part.kv_layout,
        sequence_pages=most_pages,
        microbatch_pages=0,
        active_pages=most_pages,
        prefill_activations=0,
        decode_activations=activation_bytes(part.model, 1, 1),
    )
    try:
        memory = divide_for_decode(rank.budget.limit, needs)
    except OutOfDeviceMemory:
        return None
    return BudgetedShard(make, weights, rank.budget, memory, most_pages) if memory.kv == "pages" else None
