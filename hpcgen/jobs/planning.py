"""Plans a run before it begins: rank 0 asks the planner, the run directory keeps the choice, all ranks follow it."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from hpcgen.batch.reader import BatchInput
from hpcgen.batch.request import Request
from hpcgen.cluster.world import World
from hpcgen.durable import write_json
from hpcgen.engine.build import EngineOptions, device_limit, host_pages
from hpcgen.jobs.instance import InstanceOptions, Prepared
from hpcgen.memory.device_plan import RING_SLOTS, DecodeMemory
from hpcgen.model.weight_cache import cache_directory
from hpcgen.planner.defaults import RunPlan, Situation, plan_run, restored, shape_of_run, stored
from hpcgen.planner.explain import clock
from hpcgen.planner.machine import costs_here
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.workload import Workload, of_bodies
from hpcgen.report.events import EventLog

ROUNDED = 1 << 28
SAMPLE = 1000
"""Requests whose lengths stand for those of the whole batch."""


def plan(
    world: World,
    options: InstanceOptions,
    prepared: Prepared,
    batch_input: BatchInput,
    file: Path,
    events: EventLog,
    say: Callable[[str], None],
) -> RunPlan | None:
    """The plan in `file`, where it was made in the same situation, else a new one, which is stored there.

    None, and a note, where none can be made: a run never fails for want of a plan.
    """
    situation = _situation(world, options, prepared)
    kept = _kept(file, situation)
    if kept is not None:
        found, source = kept, "as before"
    else:
        try:
            workload = _workload(batch_input, prepared.options)
            if workload is None:
                return None  # no request can be run
            found, source = _new(prepared, situation, workload)
            write_json(file, stored(situation, found, source))
        except Exception as error:
            say(f"note: no plan for this run ({error}); it takes default batch sizes")
            return None
    events.write("plan", source=source, **asdict(found))
    say(f"plan: {found.described()}; at most {clock(found.seconds)} after loading ({source})")
    return found


def follow_plan(prepared: Prepared, found: RunPlan | None) -> Prepared:
    """The instance as planned; as it is, without a plan."""
    if found is None:
        return prepared
    options = replace(
        prepared.options,
        attention_microbatch=found.attention_microbatch,
        expert_batch=found.expert_batch,
        decode_microbatch=found.decode_microbatch,
        decode_batch=found.decode_batch,
        ring_slots=max(found.prefill_slots, RING_SLOTS),
        decode_memory=DecodeMemory(max(found.decode_slots, RING_SLOTS), found.decode_kv_bytes, found.kv_streamed),
        watermark=found.watermark,
        refill_below=found.refill_below,
    )
    ranks = replace(
        prepared.ranks, partition_below=found.partition_below, migrate=prepared.ranks.migrate and found.migrate
    )
    return replace(prepared, options=options, ranks=ranks)


def _situation(world: World, options: InstanceOptions, prepared: Prepared) -> Situation:
    return Situation(
        model=str(options.model.resolve()),
        device=prepared.machine["device"],
        ranks=world.size,
        nodes=world.nodes,
        threads=torch.get_num_threads(),
        longest=prepared.options.max_model_len,
        device_memory=_device_memory(prepared.options),
        attention_batch=options.attention_microbatch,
        expert_batch=options.expert_batch,
        partition_below=options.partition_below,
    )


def _device_memory(options: EngineOptions) -> int | None:
    limit = device_limit(options)
    # What a driver says is free differs by little from start to start: that is no other situation.
    return limit if limit is None or options.device_memory is not None else limit // ROUNDED * ROUNDED


def _kept(file: Path, situation: Situation) -> RunPlan | None:
    try:
        return restored(json.loads(file.read_text()), situation)
    except (OSError, ValueError):
        return None


def _new(prepared: Prepared, situation: Situation, workload: Workload) -> tuple[RunPlan, str]:
    options = prepared.options
    dtype = str(options.dtype).removeprefix("torch.")
    shape = shape_of_run(ModelShape.read(Path(situation.model)), float(options.dtype.itemsize), dtype)
    costs, source = costs_here(cache_directory(), prepared.machine, shape, options.device, options.dtype)
    page_bytes = prepared.model.kv_layout.page_bytes
    return plan_run(costs, situation, float(host_pages(options, page_bytes) * page_bytes), workload), source


def _workload(batch_input: BatchInput, options: EngineOptions) -> Workload | None:
    """Lengths of the whole batch, from some of its requests, evenly spread."""
    lines = np.unique(np.linspace(0, len(batch_input) - 1, min(SAMPLE, len(batch_input))).astype(int)).tolist()
    requests = [request for line in lines if isinstance(request := batch_input.read(line), Request)]
    found = of_bodies((msgspec.to_builtins(request.body) for request in requests), options.max_model_len)
    if found is None or len(lines) == len(batch_input):
        return found
    return found.sized(len(found) * len(batch_input) // len(lines))
