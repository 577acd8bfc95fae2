"""This machine: what costs depend on, and what is known of its costs without asking anybody."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from hpcgen import __version__
from hpcgen.cluster.world import World
from hpcgen.kernels.layouts import choose_layout, pack
from hpcgen.kernels.linear import linear
from hpcgen.planner.costs import Costs
from hpcgen.planner.hardware import Achievable, Hardware, load_cluster
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.profile_store import find_profile

DATA_SHEETS = ("h200", "h100", "h20", "a100", "mi300x")
"""Devices of configs/clusters, as their drivers name them; of two that match, the first."""
MEASURED_TOKENS = 256
MEASURED_BYTES = 32 << 20


def machine_of(world: World, device: torch.device) -> dict[str, Any]:
    """What costs depend on besides the model. Collective."""
    own = os.sched_getaffinity(0)
    cores = own if world.node is None else set[int]().union(*world.node.allgather(own))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "ranks": world.size,
        "nodes": world.nodes,
        "threads": torch.get_num_threads(),
        "cores": len(cores),
        "memory": psutil.virtual_memory().total,
        "hpcgen": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
    }


def processor() -> str:
    """The name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def costs_here(
    cache: Path, machine: dict[str, Any], shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> tuple[Costs, str]:
    """The costs of a model on this machine, and where they are from: its profile in the `cache`, else the data sheet of
    its device, else a measurement of some tens of milliseconds. Raises PlanError."""
    ranks_per_node = -(-machine["ranks"] // machine["nodes"])
    profile = find_profile(cache, machine, shape)
    if profile is not None:
        other = "" if profile.shape["name"] == shape.name else f" with {profile.shape['name']}"
        return profile.costs(shape, ranks_per_node), f"profile of {profile.machine['date'][:10]}{other}"
    kind = device_kind(machine["device"])
    if kind is not None:
        hardware = load_cluster(kind)
        return replace(
            Costs.from_hardware(shape, hardware), ranks_per_node=ranks_per_node
        ), f"{hardware.name} data sheet"
    hardware = quick_measurement(shape, device, dtype)
    costs = replace(Costs.from_hardware(shape, hardware), ranks_per_node=ranks_per_node)
    if device.type == "cpu":
        costs = costs.sharing(ranks_per_node * machine["threads"] / machine["cores"])
    return costs, "quick measurement; `hpcgen profile` tells more"


def device_kind(name: str) -> str | None:
    """The data sheet that describes a device, by the name that its driver gives it."""
    return next((kind for kind in DATA_SHEETS if kind in name.lower().replace(" ", "")), None)


@torch.inference_mode()
def quick_measurement(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Hardware:
    """The description of a CPU with the rates of this device: one product of the model's width, and one copy."""
    rows = max(shape.attention.query_width, shape.hidden)
    weight = torch.empty(rows, shape.hidden, dtype=dtype, device=device).normal_(std=0.02)
    hidden = torch.empty(MEASURED_TOKENS, shape.hidden, dtype=dtype, device=device).normal_()
    size = (rows, shape.hidden)
    stored = pack(weight, choose_layout("linear", size, dtype) if device.type == "cpu" else "plain")
    product = _seconds(partial(linear, hidden, stored), device)
    source = torch.ones(MEASURED_BYTES, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copy = _seconds(partial(target.copy_, source), device)
    rate = 2 * MEASURED_TOKENS * rows * shape.hidden / product
    sheet = load_cluster("cpu")
    return replace(
        sheet,
        name=processor(),
        flops=dict.fromkeys({*sheet.flops, str(dtype).removeprefix("torch.")}, rate),
        memory_bandwidth=2 * MEASURED_BYTES / copy,
        achievable=Achievable(compute=1.0, memory=1.0),
    )


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])
