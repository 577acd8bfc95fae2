"""Where profiles of this machine are kept, so that `run` and `plan` find them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hpcgen.planner.errors import PlanError
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.profile_file import Profile

_SAME = ("device", "threads", "cores", "hpcgen", "torch")
"""What must be equal for a profile to be of this machine."""


def profiles_directory(cache: Path) -> Path:
    return cache / "profiles"


def default_file(cache: Path, profile: Profile) -> Path:
    """Where a profile is kept: one for each model, precision, machine and number of ranks."""
    key = {name: profile.machine[name] for name in (*_SAME, "ranks", "nodes")} | {"shape": profile.shape}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
    return profiles_directory(cache) / f"{Path(profile.model).name}-{digest}.json"


def find_profile(cache: Path, machine: dict[str, Any], shape: ModelShape) -> Profile | None:
    """The profile of this machine that says most of the model: of itself rather than of another one of its precision
    and kind, of as many ranks rather than of others. None where there is none.

    `machine`: as `profile.machine_of` describes it.
    """
    best: tuple[tuple[bool, bool, float], Profile] | None = None
    for file in sorted(profiles_directory(cache).glob("*.json")):
        try:
            profile = Profile.read(file)
            measured = ModelShape.of(profile.shape)
        except PlanError:
            continue  # of another version
        if any(profile.machine.get(name) != machine[name] for name in _SAME) or not _alike(measured, shape):
            continue
        same_ranks = (profile.ranks, profile.machine["nodes"]) == (machine["ranks"], machine["nodes"])
        rank = (_numbers(measured) == _numbers(shape), same_ranks, file.stat().st_mtime)
        if best is None or rank > best[0]:
            best = rank, profile
    return None if best is None else best[1]


def _alike(measured: ModelShape, shape: ModelShape) -> bool:
    """Whether the kernels are the same ones: precision, experts or none, latent attention or none."""
    return (
        measured.compute_dtype == shape.compute_dtype
        and measured.kv_bytes == shape.kv_bytes
        and bool(measured.experts) == bool(shape.experts)
        and measured.attention.is_latent == shape.attention.is_latent
    )


def _numbers(shape: ModelShape) -> ModelShape:
    return shape.named("")
