"""Batch completion time of a workload without a simulation: fast enough to compare many configurations."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcgen.planner.configuration import Configuration
from hpcgen.planner.costs import Costs
from hpcgen.planner.step_time import StepTime
from hpcgen.planner.workload import Workload
from hpcgen.scheduler.plan import Phase
from hpcgen.sequence import PAGE_TOKENS

SAMPLE = 4096
"""Sequences that stand for a larger batch."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a configuration makes of a workload."""

    seconds: float
    prefill_seconds: float
    decode_seconds: float
    """While batches are full."""
    tail_seconds: float
    """While they run empty, the longest sequences last."""
    active: float
    """Sequences that one rank decodes at once while batches are full."""
    prefill_rate: float
    """Tokens per second of the instance in a full wave."""
    decode_rate: float
    """Tokens per second of the instance with full batches."""
    phases: float
    """Prefill phases."""
    switch_seconds: float
    """Of a prefill phase, what does not depend on its tokens: parameters and KV that are loaded anew, and what a wave
    takes however small it is."""
    step_seconds: float
    """Of a decode step with one sequence."""


def full_batch(costs: Costs, configuration: Configuration, workload: Workload) -> float:
    """Sequences that the instance decodes at once when enough are there: as many as memory and `B_moe` allow."""
    pages_each = workload.mean_context / PAGE_TOKENS + 0.5
    live = configuration.host_pages * configuration.watermark * configuration.nodes / pages_each
    full = min(configuration.decode.expert_batch * configuration.ranks, live)
    if not (configuration.in_place or configuration.decode.kv_streamed):
        pages = configuration.decode.kv_bytes / (costs.shape.kv_token_bytes * PAGE_TOKENS)
        full = min(full, configuration.ranks * pages / (pages_each + 1))
    return max(min(full, len(workload)), 1.0)


def estimate(costs: Costs, configuration: Configuration, workload: Workload, points: int = 10) -> Estimate:
    """Waves at their full size; decode with full batches until no sequence waits; then what is left of them.

    How many run at each step follows from first-in-first-out refill of the batch, of a sample where it is large; how
    long a step takes, from the graph at some batch sizes.
    """
    time = StepTime(costs, configuration)
    ranks, count = configuration.ranks, len(workload)
    full = full_batch(costs, configuration, workload)
    context = workload.mean_context

    share = max(min(configuration.prefill.expert_batch, workload.prompt_tokens / ranks), 1.0)
    rows = max(int(share * count / workload.prompt_tokens), 1)
    wave = time.prefill(int(share), seen_length(workload), rows)
    live = configuration.host_pages * configuration.watermark * configuration.nodes * PAGE_TOKENS / max(context, 1.0)
    phases = max(2 * count / live, 1.0)
    switch = time.reconfigure(Phase.PREFILL) + time.reconfigure(Phase.DECODE)
    if not configuration.in_place:
        switch += costs.kv_seconds(full / ranks * context)
    prefill = wave * max(workload.prompt_tokens / ranks / share, 1.0) + phases * switch

    def step(batch: float) -> float:
        busiest = max(batch / ranks, 1.0)
        return time.step(busiest, busiest * context, batch, ranks)

    steps, active, waits = running(workload.outputs, full)
    sizes = np.geomspace(1.0, max(full, 1.0 + 1e-9), points)
    seconds = np.interp(np.log(np.maximum(active, 1.0)), np.log(sizes), [step(size) for size in sizes]) * steps
    return Estimate(
        seconds=prefill + float(seconds.sum()),
        prefill_seconds=prefill,
        decode_seconds=float(seconds[waits].sum()),
        tail_seconds=float(seconds[~waits].sum()),
        active=full / ranks,
        prefill_rate=share * ranks / wave,
        decode_rate=full / step(full),
        phases=phases,
        switch_seconds=switch + time.prefill(1, 1.0, 1),
        step_seconds=step(1.0),
    )


def seen_length(workload: Workload) -> float:
    """Length of the prompt that a prompt token is met in, as the mean over tokens."""
    prompts = workload.prompts.astype(np.float64)
    return float((prompts**2).sum() / prompts.sum())


def running(outputs: NDArray[np.int64], full: float) -> tuple[NDArray, NDArray, NDArray]:
    """(steps, sequences that run, whether others wait) of each interval between two ends, with refill of `full`."""
    scale = max(len(outputs) / SAMPLE, 1.0)
    if scale > 1:
        outputs = np.random.default_rng(0).choice(outputs, SAMPLE, replace=False)
    slots = max(round(full / scale), 1)
    lengths = outputs.tolist()
    running = lengths[:slots]
    heapq.heapify(running)
    ends, waiting = [], []
    for length in lengths[slots:]:
        end = running[0]
        ends.append(end)
        waiting.append(True)
        heapq.heapreplace(running, end + length)
    last = sorted(running)
    ends += last
    waiting += [False] * len(last)
    active = [slots] * (len(lengths) - len(last)) + list(range(len(last), 0, -1))
    return np.diff(np.array(ends, dtype=float), prepend=0.0), np.array(active) * scale, np.array(waiting)
