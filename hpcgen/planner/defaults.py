"""What `run` and `submit` use where the user names no batch sizes: the planner's choice for this model and machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcgen.planner.costs import Costs
from hpcgen.planner.hardware import load_cluster
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.profile_file import Profile
from hpcgen.planner.search import Choice, Memory, choose
from hpcgen.planner.workload import Workload, read_requests

TYPICAL = Workload.of(np.full(10_000, 500), np.full(10_000, 500))
"""Lengths that are planned for where no requests are given."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes that a run may use. `device` None: the host store is used in place."""

    device: float | None
    kv: float
    """Host memory of a node for KV; the weights are a file and come on top."""


def plan_run(
    model: Path,
    machine: Path | str,
    memory: MachineMemory,
    ranks: int = 1,
    ranks_per_node: int = 1,
    requests: Path | None = None,
    sample: int = 20_000,
) -> Choice:
    """The configuration for a run. `machine`: a profile (.json), or the name of a cluster kind ('cpu', 'h100', ...).

    Raises PlanError for a model that cannot be planned or does not fit.
    """
    shape = ModelShape.read(model)
    costs = machine_costs(shape, machine)
    workload = TYPICAL if requests is None else read_requests(requests, sample=sample)
    room = Memory(memory.device, memory.kv + shape.total_bytes)
    return choose(replace(costs, streamed=memory.device is not None), ranks, ranks_per_node, room, workload)


def machine_costs(shape: ModelShape, machine: Path | str) -> Costs:
    """From a profile, or from the data sheets of a cluster kind."""
    if str(machine).endswith(".json"):
        return Profile.read(Path(machine)).costs(shape)
    return Costs.from_hardware(shape, load_cluster(str(machine)))


def device_kind(name: str) -> str:
    """The cluster kind whose data sheet describes a device, by the name that its driver gives it; 'cpu' otherwise."""
    for kind in ("h200", "h100", "h20", "a100", "mi300x"):
        if kind in name.lower():
            return kind
    return "cpu"


def stored(choice: Choice, machine: Path | str) -> dict[str, Any]:
    """The choice as the run directory keeps it: plain values."""
    configuration, found = choice.configuration, choice.estimate
    return {
        "machine": str(machine),
        "ranks": configuration.ranks,
        "prefill": {
            "attention_batch": configuration.prefill.attention_batch,
            "expert_batch": configuration.prefill.expert_batch,
            "resident_layers": configuration.prefill.resident_layers,
            "ring_slots": configuration.prefill.ring_slots,
        },
        "decode": {
            "attention_batch": configuration.decode.attention_batch,
            "expert_batch": configuration.decode.expert_batch,
            "resident_layers": configuration.decode.resident_layers,
            "ring_slots": configuration.decode.ring_slots,
            "kv_streamed": configuration.decode.kv_streamed,
        },
        "host_pages": configuration.host_pages,
        "watermark": configuration.watermark,
        "refill_below": configuration.refill_below,
        "partition_below": configuration.partition_below,
        "predicted_seconds": round(found.seconds, 3),
        "predicted_prefill_rate": round(found.prefill_rate, 1),
        "predicted_decode_rate": round(found.decode_rate, 1),
    }
