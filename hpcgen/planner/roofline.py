"""Roofline models: how long a kernel takes for so many operations and bytes, given or fitted to measurements.

Williams, Waterman, Patterson: Roofline (CACM 2009), with a fixed cost for the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel has to do: floating-point operations, and bytes read and written."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.bytes * times)


@dataclass(frozen=True, slots=True)
class Roofline:
    """seconds = fixed + max(flops / rate, bytes / bandwidth)."""

    fixed: float
    flops_per_second: float
    bytes_per_second: float

    def waits_for_memory(self, work: Work) -> bool:
        return work.bytes / self.bytes_per_second > work.flops / self.flops_per_second

    def slower(self, times: float) -> Roofline:
        return Roofline(self.fixed * times, self.flops_per_second / times, self.bytes_per_second / times)

    def seconds(self, work: Work) -> float:
        return self.fixed + max(work.flops / self.flops_per_second, work.bytes / self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class Fit:
    """A roofline fitted to measurements, and how far it is from them."""

    roofline: Roofline
    median_error: float
    """Median of |predicted - measured| / measured."""
    worst_error: float


def fit(work: Sequence[Work], seconds: Sequence[float]) -> Fit:
    """The roofline with the least squared relative error. Raises ValueError without measurements.

    Alternates between which roof bounds each measurement and the least squares of that assignment, from several
    starts; every constant is at least 0.
    """
    if not work or len(work) != len(seconds):
        raise ValueError("as many times as works are needed, and at least one")
    flops = np.array([item.flops for item in work], dtype=np.float64)
    nbytes = np.array([item.bytes for item in work], dtype=np.float64)
    measured = np.array(seconds, dtype=np.float64)
    order = np.argsort(flops / np.maximum(nbytes, 1.0), kind="stable")
    best, best_error = _constants(flops, nbytes, measured, np.ones(len(measured), bool)), np.inf
    for split in {0, len(order) // 4, len(order) // 2, 3 * len(order) // 4, len(order)}:
        compute_bound = np.ones(len(order), bool)
        compute_bound[order[:split]] = False
        for _ in range(20):
            constants = _constants(flops, nbytes, measured, compute_bound)
            error = _squared_error(constants, flops, nbytes, measured)
            if error < best_error:
                best, best_error = constants, error
            assigned = constants[1] * flops >= constants[2] * nbytes
            if (assigned == compute_bound).all():
                break
            compute_bound = assigned
    fixed, per_flop, per_byte = best
    roofline = Roofline(float(fixed), _rate(per_flop), _rate(per_byte))
    predicted = np.array([roofline.seconds(item) for item in work])
    errors = np.abs(predicted - measured) / measured
    return Fit(roofline, float(np.median(errors)), float(errors.max()))


def _rate(seconds_each: float) -> float:
    return float(1 / seconds_each) if seconds_each > 0 else float("inf")


def _squared_error(constants: NDArray, flops: NDArray, nbytes: NDArray, measured: NDArray) -> float:
    predicted = constants[0] + np.maximum(constants[1] * flops, constants[2] * nbytes)
    return float((((predicted - measured) / measured) ** 2).sum())


def _constants(flops: NDArray, nbytes: NDArray, measured: NDArray, compute_bound: NDArray) -> NDArray:
    """Non-negative least squares of relative error by trying each subset of three columns."""
    columns = np.stack([np.ones_like(measured), flops * compute_bound, nbytes * ~compute_bound], axis=1)
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0
    weighted = columns / scale / measured[:, None]
    best, best_error = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            solution, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(measured)), rcond=None)
            if (solution < 0).any():
                continue
            error = float(((weighted[:, chosen] @ solution - 1) ** 2).sum())
            if error < best_error - 1e-12:
                best_error = error
                best = np.zeros(3)
                best[list(chosen)] = solution / scale[list(chosen)]
    return best
