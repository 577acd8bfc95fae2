"""What `run` and `submit` use where the user names no batch sizes: the planner's choice for this batch and machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcgen.planner.completion import Estimate
from hpcgen.planner.costs import Costs
from hpcgen.planner.errors import PlanError
from hpcgen.planner.explain import clock
from hpcgen.planner.hardware import load_cluster
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.search import Choice, Given, Memory, choose
from hpcgen.planner.workload import Workload, read_requests

SAMPLE = 2000
"""Requests of a long file whose lengths stand for those of all."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a run knows of itself before it is planned. A plan made in one holds in an equal one. Plain values."""

    model: str
    device: str
    ranks: int
    nodes: int
    threads: int
    longest: int
    """Most tokens of a sequence."""
    device_memory: int | None
    """Bytes; None: the host store is used in place."""
    attention_batch: int | None = None
    """As the user wants it, as the two that follow."""
    expert_batch: int | None = None
    partition_below: int | None = None

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the planner decided for a run, in the engine's terms, and what it foresees. Plain values."""

    attention_microbatch: int
    """Tokens of an attention call in prefill (`B_attn`)."""
    expert_batch: int
    """Tokens of a wave (`B_moe`)."""
    decode_microbatch: int
    """Sequences of an attention call in decode (`B_attn`)."""
    decode_batch: int
    """Most sequences that a rank decodes at once (`B_moe`)."""
    prefill_slots: int
    """Of the ring buffer; 0: all parameters are resident."""
    decode_slots: int
    decode_kv_bytes: int | None
    """KV pages on the device; None: the host store is used in place, or KV is streamed."""
    kv_streamed: bool
    watermark: float
    refill_below: float
    partition_below: int
    migrate: bool
    """Whether a sequence's KV is pulled from another node; else it stays where it was computed."""
    seconds: float
    """Batch completion, loading excluded, where every output is as long as it may be."""
    prefill_seconds: float
    decode_seconds: float
    prefill_rate: float
    """Tokens/s of the instance."""
    decode_rate: float

    @classmethod
    def of(cls, choice: Choice) -> RunPlan:
        configuration, found = choice.configuration, choice.estimate
        prefill, decode = configuration.prefill, configuration.decode
        in_pages = not configuration.in_place and not decode.kv_streamed
        return cls(
            attention_microbatch=prefill.attention_batch,
            expert_batch=prefill.expert_batch,
            decode_microbatch=decode.attention_batch,
            decode_batch=decode.expert_batch,
            prefill_slots=prefill.ring_slots,
            decode_slots=decode.ring_slots,
            decode_kv_bytes=int(decode.kv_bytes) if in_pages else None,
            kv_streamed=decode.kv_streamed,
            watermark=configuration.watermark,
            refill_below=configuration.refill_below,
            partition_below=configuration.partition_below,
            migrate=configuration.migrate,
            **_foreseen(found),
        )

    def described(self) -> str:
        """The batch sizes of prefill and decode."""
        attention = f"B_attn {self.attention_microbatch:,} tokens and {self.decode_microbatch:,} sequences"
        return f"{attention}, B_moe {self.expert_batch:,} and {self.decode_batch:,}"


def plan_run(costs: Costs, situation: Situation, kv_memory: float, workload: Workload) -> RunPlan:
    """The configuration for a run. `kv_memory`: bytes of a node's host memory for KV; the weights come on top.

    Raises PlanError for a model that cannot be planned or does not fit.
    """
    device = situation.device_memory
    given = Given(
        situation.attention_batch, situation.expert_batch, situation.partition_below, longest=situation.longest
    )
    memory = Memory(device, kv_memory + costs.shape.total_bytes)
    costs = replace(costs, streamed=device is not None)
    choice = choose(costs, situation.ranks, situation.ranks_per_node, memory, workload, given)
    return RunPlan.of(choice)


def stored(situation: Situation, plan: RunPlan, source: str) -> dict[str, Any]:
    """As the run directory keeps it."""
    return {"situation": asdict(situation), "source": source, "plan": asdict(plan)}


def restored(content: dict[str, Any], situation: Situation) -> RunPlan | None:
    """The plan of an earlier job of the run, where it was made in the same situation."""
    try:
        return RunPlan(**content["plan"]) if content["situation"] == asdict(situation) else None
    except (KeyError, TypeError):
        return None  # of another version


def predicted_by_data_sheet(model: Path, requests: Path, count: int, cluster: str, ranks: int) -> str | None:
    """When `count` requests would be done on so many devices of a cluster file, in words; None where nobody knows."""
    try:
        hardware = load_cluster(cluster).with_devices(ranks)
        costs = Costs.from_hardware(ModelShape.read(model), hardware)
        workload = read_requests(requests, sample=SAMPLE)
        if count > SAMPLE:
            workload = workload.sized(len(workload) * count // SAMPLE)
        choice = choose(costs, ranks, hardware.devices_per_node, Memory.of(hardware), workload)
    except PlanError:
        return None
    return f"at most {clock(choice.estimate.seconds)} on {ranks} {hardware.name}, by data sheet; the job plans anew"


def shape_of_run(shape: ModelShape, dtype_bytes: float, dtype: str) -> ModelShape:
    """The shape with parameters and KV in the precision of the run, where they are not quantised."""
    quantised = shape.weight_bytes < 2
    return replace(
        shape,
        weight_bytes=shape.weight_bytes if quantised else dtype_bytes,
        expert_bytes=shape.expert_bytes if shape.expert_bytes < 2 else dtype_bytes,
        kv_bytes=dtype_bytes,
        compute_dtype=shape.compute_dtype if quantised else dtype,
    )


def _foreseen(found: Estimate) -> dict[str, float]:
    return {
        "seconds": round(found.seconds, 3),
        "prefill_seconds": round(found.prefill_seconds, 3),
        "decode_seconds": round(found.decode_seconds + found.tail_seconds, 3),
        "prefill_rate": round(found.prefill_rate, 1),
        "decode_rate": round(found.decode_rate, 1),
    }
