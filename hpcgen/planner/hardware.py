"""Machines by data sheet: devices, nodes, links. `configs/clusters/` has them, each number with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hpcgen.planner.errors import PlanError

CLUSTERS = Path(__file__).parent.parent / "configs" / "clusters"


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes, in one direction: seconds before the first, bytes per second after it."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth if nbytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Achievable:
    """Shares of the peak rates that well-made kernels and copies reach: assumptions, where nothing was measured."""

    compute: float = 0.65
    memory: float = 0.8
    link: float = 0.8


@dataclass(frozen=True, slots=True)
class Fixed:
    """Seconds that do not depend on the batch: assumptions, where nothing was measured."""

    launch: float = 5e-6
    """Before a kernel begins: on a GPU, the order of magnitude of CUDA's launch latency."""
    layer: float = 50e-6
    """Of a microbatch in a layer beside its kernels."""
    step: float = 2e-3
    """Of a step beside its layers."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A cluster of equal nodes. Bytes, bytes per second, operations per second, seconds; rates are peaks."""

    name: str
    memory: float
    """Of one device."""
    memory_bandwidth: float
    flops: Mapping[str, float]
    devices_per_node: int
    host_memory: float
    """Of one node."""
    host: Link
    """Between host memory and one device."""
    local: Link
    """Between devices of a node, one device's share."""
    remote: Link
    """Between nodes, one device's share."""
    disk: Link
    """Of one node."""
    devices: int = 1
    fixed: Fixed = field(default_factory=Fixed)
    achievable: Achievable = field(default_factory=Achievable)

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)

    def peak_flops(self, dtype: str) -> float:
        """Of a type that the device has; what it lacks is computed in the next wider one."""
        for wider in (dtype, "bfloat16", "float16", "float32"):
            if wider in self.flops:
                return self.flops[wider]
        raise PlanError(f"cluster {self.name} names no rate for {dtype}")

    def with_devices(self, devices: int) -> Hardware:
        return replace(self, devices=devices)

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        return tuple(rank // self.devices_per_node for rank in range(self.devices))

    def between(self, ranks: int) -> Link:
        """The link that bounds an exchange among `ranks` ranks."""
        return self.local if ranks <= self.devices_per_node else self.remote


def load_cluster(name: str) -> Hardware:
    """'h20x16': 16 devices of configs/clusters/h20.yaml; or the path of such a file, with ':16' after it.

    Raises PlanError.
    """
    match = re.fullmatch(r"(?P<kind>[a-z0-9]*[a-z0-9])x(?P<count>[1-9]\d*)", name)
    if match is not None and (CLUSTERS / f"{match['kind']}.yaml").is_file():
        return read_cluster(CLUSTERS / f"{match['kind']}.yaml").with_devices(int(match["count"]))
    path, _, count = name.partition(":")
    file = CLUSTERS / f"{path}.yaml" if "/" not in path and not path.endswith(".yaml") else Path(path)
    if not file.is_file() or (count and not count.isdigit()) or count == "0":
        known = ", ".join(sorted(known.stem for known in CLUSTERS.glob("*.yaml")))
        raise PlanError(
            f"{name!r} is no cluster: write KINDxDEVICES with KIND one of {known} (h20x16), or FILE.yaml:DEVICES"
        )
    hardware = read_cluster(file)
    return hardware.with_devices(int(count) if count else hardware.devices_per_node)


def read_cluster(file: Path) -> Hardware:
    """One file of configs/clusters/, with the devices of one node. Raises PlanError."""
    try:
        content = yaml.safe_load(file.read_text())
        device, node, links = content["device"], content["node"], content["links"]
        return Hardware(
            name=content["name"],
            memory=float(device["memory"]),
            memory_bandwidth=float(device["memory_bandwidth"]),
            flops={dtype: float(rate) for dtype, rate in device["flops"].items()},
            devices_per_node=int(node["devices"]),
            host_memory=float(node["host_memory"]),
            devices=int(node["devices"]),
            achievable=Achievable(**content.get("achievable", {})),
            fixed=Fixed(**content.get("fixed", {})),
            **{kind: _link(links[kind]) for kind in ("host", "local", "remote", "disk")},
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"{file} is not a cluster description as those in {CLUSTERS}: {error!r}") from None


def _link(content: dict[str, Any]) -> Link:
    return Link(float(content["bandwidth"]), float(content.get("latency", 0.0)))
