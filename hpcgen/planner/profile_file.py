"""A measured machine: fitted rooflines and links, stored with what they were measured on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcgen.planner.costs import Costs
from hpcgen.planner.errors import PlanError
from hpcgen.planner.hardware import Link
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.roofline import Fit, Roofline
from hpcgen.planner.search import HOST_SHARE, Memory

VERSION = 1


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
class Profile:
    """What `hpcgen profile` found. Times in seconds, sizes in bytes."""

    machine: dict[str, Any]
    """Processor, device, threads, versions, date."""
    model: str
    host_memory: float
    device_memory: float | None
    """None: a CPU, on which the host store is used in place."""
    fits: dict[str, KernelFit]
    links: dict[str, Link]
    layer_fixed: float = 0.0
    token_fixed: float = 0.0
    row_fixed: float = 0.0
    step_fixed: float = 0.0
    points: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """The measurements themselves, by kernel."""

    def write(self, file: Path) -> None:
        content = asdict(self)
        for fit in content["fits"].values():  # JSON has no infinity
            for rate in ("flops_per_second", "bytes_per_second"):
                fit[rate] = fit[rate] if fit[rate] != float("inf") else None
        file.write_text(json.dumps({"version": VERSION, **content}, indent=1))

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
            content["links"] = {name: Link(**link) for name, link in content["links"].items()}
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{file} is not a profile: {error!r}; make one with `hpcgen profile`") from None

    def costs(self, shape: ModelShape) -> Costs:
        """Costs of a model on this machine; kernels of another model are taken by their operations and bytes."""
        linear = self.fits["linear"].roofline
        return Costs(
            shape=shape,
            linear=linear,
            prefill_attention=self.fits["prefill_attention"].roofline,
            decode_attention=self.fits["decode_attention"].roofline,
            experts=self.fits["experts"].roofline if "experts" in self.fits else linear,
            host=self.links["host"],
            local=self.links["local"],
            remote=self.links["remote"],
            disk=self.links["disk"],
            layer_fixed=self.layer_fixed,
            token_fixed=self.token_fixed,
            row_fixed=self.row_fixed,
            step_fixed=self.step_fixed,
            streamed=self.device_memory is not None,
        )

    def memory(self) -> Memory:
        return Memory(self.device_memory, self.host_memory * HOST_SHARE)
