"""Decode with experts spread over the ranks: each computes its own experts for the tokens of all.

A step is collective: a rank without sequences takes part in the exchange of every sparse layer, with no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcgen.cluster.waiting import wait
from hpcgen.cluster.watchdog import Watchdog
from hpcgen.kernels.dispatch.interface import Dispatcher, expert_range
from hpcgen.kernels.experts.interface import ExpertsBackend, ExpertWeights
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.memory.device import Device
from hpcgen.model.causal import CausalModel
from hpcgen.model.experts import is_experts_module
from hpcgen.model.units import layer_unit
from hpcgen.scheduler.plan import Phase

if TYPE_CHECKING:
    from mpi4py import MPI


class SpreadExperts:
    """An experts backend: dispatch, the own experts by another backend, combine."""

    name = "spread"

    def __init__(
        self, dispatcher: Dispatcher, backend: ExpertsBackend, experts: int, rank: int, ranks: int, watchdog: Watchdog
    ) -> None:
        """`experts` of each layer, of which this rank owns those of `expert_range`."""
        self._watchdog = watchdog
        self._dispatcher, self._backend = dispatcher, backend
        self._experts, self._rank, self._ranks = experts, rank, ranks
        self._own: dict[int, tuple[ExpertWeights, ExpertWeights]] = {}

    def forward(
        self, weights: ExpertWeights, hidden: torch.Tensor, top_index: torch.Tensor, top_weight: torch.Tensor
    ) -> torch.Tensor:
        with self._watchdog.waiting("tokens for its experts"):
            came = self._dispatcher.dispatch(hidden, top_index, top_weight)
        out = came.hidden
        if len(out):
            out = self._backend.forward(self._of_this_rank(weights), out, came.top_index, came.top_weight)
        with self._watchdog.waiting("the experts of other ranks"):
            return self._dispatcher.combine(out, came.handle)

    def _of_this_rank(self, weights: ExpertWeights) -> ExpertWeights:
        if weights.count < self._experts:
            return weights  # a device that holds only these
        known = self._own.get(id(weights))
        if known is None or known[0] is not weights:
            first, count = expert_range(self._rank, self._ranks, self._experts)
            known = self._own[id(weights)] = weights, run_of_experts(weights, first, count)
        return known[1]


def run_of_experts(weights: ExpertWeights, first: int, count: int) -> ExpertWeights:
    """Experts [first, first + count) of a layer's, as views."""
    run = slice(first, first + count)
    return replace(
        weights,
        gate_up=_run_of(weights.gate_up, run),
        down=_run_of(weights.down, run),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias[run],
        down_bias=None if weights.down_bias is None else weights.down_bias[run],
        first=weights.first + first,
    )


def _run_of(stored: StoredTensor, run: slice) -> StoredTensor:
    return replace(
        stored,
        data=stored.data[run],
        shape=(run.stop - run.start, *stored.shape[1:]),
        scale=None if stored.scale is None else stored.scale[run],
    )


class ExpertParallelPeers:
    """The ranks that share the experts in decode; in prefill each computes all experts for its own tokens."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        model: CausalModel,
        device: Device,
        dispatcher: Dispatcher,
        watchdog: Watchdog,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`model` has the experts backend that computes on this rank; `experts_of(model)` is not None."""
        from mpi4py import MPI

        self.close = close
        """Gives back what the dispatcher holds. Collective."""
        experts = experts_of(model)
        assert experts is not None

        self._comm, self._max = comm, MPI.MAX
        self._model, self._device, self._watchdog = model, device, watchdog
        self._slots = model.config.get_text_config().num_experts_per_tok
        own = model.experts_backend
        spread = SpreadExperts(dispatcher, own, experts, comm.rank, comm.size, watchdog)
        self._backends: dict[Phase, ExpertsBackend] = {Phase.PREFILL: own, Phase.DECODE: spread}

    def enter(self, phase: Phase) -> None:
        self._model.experts_backend = self._backends[phase]

    def any_active(self, active: int) -> bool:
        most = np.zeros(1, dtype=np.int64)
        with self._watchdog.waiting("the other ranks to come to the next step"):
            wait(self._comm.Iallreduce(np.array([active], dtype=np.int64), most, self._max))
        return bool(most[0])

    @torch.inference_mode()
    def idle_step(self) -> None:
        model = self._model
        hidden = torch.empty(0, model.config.get_text_config().hidden_size, dtype=model.dtype, device=model.device)
        index = torch.empty(0, self._slots, dtype=torch.int64, device=model.device)
        for layer in sorted(model.experts):
            self._device.parameters.require(layer_unit(layer))
            weights = model.experts[layer].weights
            assert weights is not None
            model.experts_backend.forward(weights, hidden, index, index.float())


def experts_of(model: CausalModel) -> int | None:
    """Routed experts of each sparse layer; None for a model without any, or whose layers differ."""
    counts = {
        int(child.num_experts)  # type: ignore[arg-type]
        for layer in model.experts
        for child in model.experts_stage(layer).modules()
        if is_experts_module(child)
    }
    known = getattr(model.config.get_text_config(), "num_experts_per_tok", None) is not None
    return counts.pop() if len(counts) == 1 and known else None
