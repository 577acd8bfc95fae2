"""A measured machine: fitted rooflines and links, stored with what they were measured on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcgen.planner.costs import Costs
from hpcgen.planner.errors import PlanError
from hpcgen.planner.hardware import Link
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.roofline import Fit, Roofline
from hpcgen.planner.search import HOST_SHARE, Memory

VERSION = 3
_LINKS = {
    "host": "host to device",
    "back": "device to host",
    "disk": "disk",
    "local": "exchange in a node",
    "remote": "exchange of nodes",
    "window": "window of a rank",
}


@dataclass(frozen=True, slots=True)
class KernelFit:
    """A fitted kernel, and how well it fits."""

    fixed: float
    flops_per_second: float
    bytes_per_second: float
    median_error: float
    worst_error: float
    points: int

    @classmethod
    def of(cls, fit: Fit, points: int) -> KernelFit:
        line = fit.roofline
        return cls(line.fixed, line.flops_per_second, line.bytes_per_second, fit.median_error, fit.worst_error, points)

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.fixed, self.flops_per_second, self.bytes_per_second)

    def describe(self) -> str:
        return (
            f"{self.fixed * 1e6:10,.1f} us + max(flops / {self.flops_per_second / 1e9:,.1f} G, bytes / "
            f"{self.bytes_per_second / 1e9:,.2f} GB/s)   error: median {self.median_error:.1%}, worst "
            f"{self.worst_error:.1%} of {self.points} points"
        )


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A fitted link, and how well it fits. Of 0 points: not measured, and taken as another one."""

    bandwidth: float
    latency: float
    median_error: float = 0.0
    worst_error: float = 0.0
    points: int = 0

    @classmethod
    def of(cls, fit: Fit, points: int) -> LinkFit:
        line = fit.roofline
        return cls(min(line.bytes_per_second, 1e15), line.fixed, fit.median_error, fit.worst_error, points)

    @property
    def link(self) -> Link:
        return Link(self.bandwidth, self.latency)

    def describe(self) -> str:
        line = f"{self.latency * 1e6:10,.1f} us + bytes / {self.bandwidth / 1e9:,.2f} GB/s"
        if not self.points:
            return f"{line}   not measured: taken as a copy"
        return f"{line}   error: median {self.median_error:.1%}, worst {self.worst_error:.1%} of {self.points} points"


@dataclass(frozen=True, slots=True)
class Profile:
    """What `hpcgen profile` found. Times in seconds, sizes in bytes."""

    machine: dict[str, Any]
    """Processor or device, ranks and nodes, threads, cores, versions, date."""
    model: str
    shape: dict[str, Any]
    """Of the model, as `ModelShape`."""
    host_memory: float
    device_memory: float | None
    """None: a CPU, on which the host store is used in place."""
    fits: dict[str, KernelFit]
    links: dict[str, LinkFit]
    layer_fixed: float = 0.0
    token_fixed: float = 0.0
    weight_fixed: float = 0.0
    page_fixed: float = 0.0
    row_fixed: float = 0.0
    step_fixed: float = 0.0
    engine_median_error: float = 0.0
    """Of the steps and waves that the four above were fitted to."""
    engine_worst_error: float = 0.0
    points: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """The measurements themselves, by kernel."""

    def write(self, file: Path) -> None:
        content = asdict(self)
        for fit in content["fits"].values():  # JSON has no infinity
            for rate in ("flops_per_second", "bytes_per_second"):
                fit[rate] = fit[rate] if fit[rate] != float("inf") else None
        text = json.dumps({"version": VERSION, **content}, indent=1)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            aside = file.with_name(f".{file.name}.{os.getpid()}.part")
            aside.write_text(text)
            aside.replace(file)
        except OSError as error:
            raise PlanError(f"the profile {file} cannot be written: {error.strerror}") from None

    def describe(self) -> str:
        """Everything `hpcgen profile` prints about it."""
        machine = self.machine
        each = f"{self.token_fixed * 1e6:,.2f} a token and layer, {self.row_fixed * 1e6:,.1f} a sampled token"
        each += f", {self.step_fixed * 1e6:,.0f} a step, {self.page_fixed * 1e6:,.1f} a page of a layer"
        lines = [
            f"{machine['device']}: {machine['ranks']} ranks on {machine['nodes']} nodes, {machine['threads']} threads "
            f"each, {machine['cores']} cores a node",
            *(f"{name:<18} {fit.describe()}" for name, fit in self.fits.items()),
            *(f"{_LINKS[name]:<18} {fit.describe()}" for name, fit in self.links.items()),
            f"beside kernels     {self.layer_fixed * 1e6:,.1f} us a microbatch and layer, {each}   "
            f"error: median {self.engine_median_error:.1%}, worst {self.engine_worst_error:.1%}",
        ]
        return "\n".join(lines)

    @classmethod
    def read(cls, file: Path) -> Profile:
        """Raises PlanError."""
        try:
            content = json.loads(file.read_text())
            if content.pop("version") != VERSION:
                raise ValueError("it was written by another version")
            content["fits"] = {
                name: KernelFit(**{key: float("inf") if value is None else value for key, value in fit.items()})  # type: ignore[arg-type]
                for name, fit in content["fits"].items()
            }
            content["links"] = {name: LinkFit(**link) for name, link in content["links"].items()}
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{file} is not a profile: {error!r}; make one with `hpcgen profile`") from None

    @property
    def ranks(self) -> int:
        return int(self.machine["ranks"])

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // int(self.machine["nodes"]))

    def costs(self, shape: ModelShape, ranks_per_node: int | None = None) -> Costs:
        """Costs of a model on this machine; kernels of another model are taken by their operations and bytes.

        On more ranks than cores, where fewer were measured, each is slower by as much as they are too many.
        """
        linear = self.fits["linear"].roofline
        links = {name: fit.link for name, fit in self.links.items()}
        on_cpu = self.device_memory is None
        measured = Costs(
            shape=shape,
            linear=linear,
            prefill_attention=self.fits["prefill_attention"].roofline,
            decode_attention=self.fits["decode_attention"].roofline,
            experts=self.fits["experts"].roofline if "experts" in self.fits else linear,
            host=links["host"],
            back=links["back"],
            local=links["local"],
            remote=links["remote"],
            disk=links["disk"],
            window=links["window"],
            layer_fixed=self.layer_fixed,
            token_fixed=self.token_fixed,
            weight_fixed=self.weight_fixed,
            page_fixed=self.page_fixed,
            row_fixed=self.row_fixed,
            step_fixed=self.step_fixed,
            ranks_per_node=ranks_per_node or self.ranks_per_node,
            streamed=not on_cpu,
            copies_compute=on_cpu and self._cores_needed(ranks_per_node or self.ranks_per_node) >= self._cores,
            ranks_a_core=self._ranks_a_core(self.ranks_per_node),
        )
        return measured.sharing(self._ranks_a_core(ranks_per_node or self.ranks_per_node)) if on_cpu else measured

    @property
    def _cores(self) -> int:
        return max(int(self.machine["cores"]), 1)

    def _cores_needed(self, ranks_per_node: int) -> int:
        return ranks_per_node * int(self.machine["threads"])

    def _ranks_a_core(self, ranks_per_node: int) -> float:
        return max(self._cores_needed(ranks_per_node) / self._cores, 1.0)

    def memory(self) -> Memory:
        return Memory(self.device_memory, self.host_memory * HOST_SHARE)
