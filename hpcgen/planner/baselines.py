"""Other ways to run a batch, on the same costs: what interactive engines and offloading systems would take."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from hpcgen.planner import work
from hpcgen.planner.completion import running
from hpcgen.planner.configuration import activation_bytes, embedding_bytes, layer_bytes
from hpcgen.planner.costs import Costs
from hpcgen.planner.errors import PlanError
from hpcgen.planner.search import Memory
from hpcgen.planner.workload import Workload

STEPS_AT_ONCE = 32
"""Decode steps between two looks at a batch in which nothing ends: their time is taken at the first one's context."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What is assumed of an engine with continuous batching."""

    mixes: bool = True
    """Prefill is computed in the same step as decode, so that one reads what the other multiplies; else in its own."""
    balances: bool = False
    """All ranks always have equal contexts; else they have as many sequences, and the longest contexts decide."""
    hides_exchange: bool = False
    """Exchanges are hidden behind computation; else they are as ours."""
    memory: float = 1.0
    """Share of the device that it uses; the rest is held back for captured graphs and fragmentation."""


EQUAL = Engine()
"""What is assumed of ours."""
IDEAL = Engine(balances=True, hides_exchange=True)
DEPLOYED = Engine(mixes=False, memory=0.9)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a batch takes another system."""

    name: str
    seconds: float
    largest_batch: float
    """Most sequences that ran at once, on all ranks."""
    finish: np.ndarray
    """When each sequence finished."""
    setting: str
    """What was tuned."""


def continuous(
    costs: Costs,
    memory: Memory,
    ranks: int,
    workload: Workload,
    most: int,
    chunk: int,
    tensor_parallel: bool,
    engine: Engine = EQUAL,
) -> Baseline:
    """Continuous batching with everything resident and prefill by chunks (Orca, vLLM, SGLang).

    A sequence that loses its place for want of memory is recomputed. Raises PlanError where the model does not fit the
    devices.
    """
    if memory.device is not None:
        memory = replace(memory, device=memory.device * engine.memory)
    capacity = _resident_kv_tokens(costs, memory, ranks, most, chunk, tensor_parallel)
    spread = 0.0 if engine.balances else _spread_of_contexts(workload)
    if capacity < int((workload.prompts + workload.outputs).max()):
        raise PlanError(f"{costs.shape.name} does not fit {ranks} devices with its longest sequence and all resident")
    step = _remembered(
        lambda batch, context, prefill, length: _mixed_step(
            costs, ranks, batch, context, prefill, length, tensor_parallel, engine, spread
        )
    )
    clock, steps, context = 0.0, 0, 0
    finish = np.zeros(len(workload))
    prompts, outputs = workload.prompts.tolist(), workload.outputs.tolist()
    decoded = [0] * len(workload)
    waiting = list(range(len(workload)))[::-1]
    running: list[tuple[int, int]] = []  # (step at which it ends, sequence)
    started: dict[int, int] = {}
    backlog: list[list[int]] = []  # [sequence, tokens still to prefill], oldest first
    largest = 0
    while waiting or running or backlog:
        while waiting and len(running) + len(backlog) < most:
            need = prompts[waiting[-1]] + decoded[waiting[-1]]
            if context + need > 0.95 * capacity and (running or backlog):
                break
            context += need
            backlog.append([waiting.pop(), need])
        largest = max(largest, len(running) + len(backlog))
        budget, length, ready = chunk, 1, []
        for entry in backlog:
            taken = min(budget, entry[1])
            entry[1] -= taken
            budget -= taken
            length = max(length, prompts[entry[0]])
            if entry[1] == 0:
                ready.append(entry[0])
            if budget == 0:
                break
        backlog = backlog[len(ready) :]
        count = 1
        if budget == chunk and running:
            room = int((capacity - context) // len(running))
            count = max(1, min(running[0][0] - steps, STEPS_AT_ONCE, room))
        clock += count * step(len(running), context, chunk - budget, length)
        steps += count
        context += count * len(running)
        for sequence in ready:
            started[sequence] = steps
            heapq.heappush(running, (steps + outputs[sequence] - decoded[sequence] - 1, sequence))
        while running and running[0][0] <= steps:
            _, sequence = heapq.heappop(running)
            context -= prompts[sequence] + decoded[sequence] + steps - started.pop(sequence)
            finish[sequence] = clock
        while context > capacity and len(running) > 1:
            youngest = max(sequence for _, sequence in running)
            running = [entry for entry in running if entry[1] != youngest]
            heapq.heapify(running)
            grown = steps - started.pop(youngest)
            context -= prompts[youngest] + decoded[youngest] + grown
            decoded[youngest] += grown
            waiting.append(youngest)
    setting = f"batch {most}, chunk {chunk}, {'tensor' if tensor_parallel else 'data'}-parallel attention"
    return Baseline("continuous", clock, largest, finish, setting)


def tuned_continuous(costs: Costs, memory: Memory, ranks: int, workload: Workload, engine: Engine = EQUAL) -> Baseline:
    """Continuous batching with its best batch, chunk and parallelism of attention. Raises PlanError where none fits."""
    best: Baseline | None = None
    reason: PlanError | None = None
    for tensor_parallel in (False, True):
        for most in (64 * ranks, 256 * ranks, 1024 * ranks):
            for chunk in (512 * ranks, 2048 * ranks):
                try:
                    found = continuous(costs, memory, ranks, workload, most, chunk, tensor_parallel, engine)
                except PlanError as error:
                    reason = error
                    continue
                if best is None or found.seconds < best.seconds:
                    best = found
    if best is None:
        assert reason is not None
        raise reason
    return best


def layerwise_offload(costs: Costs, memory: Memory, ranks: int, workload: Workload) -> Baseline:
    """Layers streamed at every step, with one batch for the whole model that runs to its longest member's end.

    FlexGen (ICML'23) and MoE-Lightning (ASPLOS'25): attention and experts have the same batch, since it is the model
    that is batched. KV lies in the host store, with room for the longest sequence in every place; the device holds
    two layers of KV, and as many layers of weights as fit.
    """
    shape = costs.shape
    longest = int((workload.prompts + workload.outputs).max())
    one = layer_bytes(shape, ranks)
    kv_layer = shape.attention.kv_elements * shape.kv_bytes
    if memory.device is None:
        raise PlanError("layer-wise offloading needs a device with a memory of its own")
    left = memory.device - 2 * one - embedding_bytes(shape)
    batch = 1
    while 2 * batch <= len(workload) / ranks:
        need = 2 * 2 * batch * workload.mean_context * kv_layer + activation_bytes(shape, 2 * batch, 2 * batch)
        nodes = -(-ranks // costs.ranks_per_node)
        host = 2 * batch * ranks / nodes * longest * shape.kv_token_bytes + shape.total_bytes
        if need > left or host > memory.host:
            break
        batch *= 2
    if left < 0:
        raise PlanError(f"two layers of {shape.name} do not fit a device")
    used = 4 * batch * workload.mean_context * kv_layer + activation_bytes(shape, batch, batch)
    resident = min(max(int((left - used) // one), 0), shape.layers)
    fetch = costs.host.seconds(one) * (1 - resident / shape.layers)
    clock = 0.0
    finish = np.zeros(len(workload))
    for first in range(0, len(workload), batch * ranks):
        part = slice(first, first + batch * ranks)
        prompts, outputs = workload.prompts[part], workload.outputs[part]
        each = len(prompts) / ranks
        tokens = float(prompts.sum()) / ranks
        chunks = max(tokens / 8192, 1.0)
        compute = costs.attention_prefill_seconds(tokens / chunks, float(prompts.mean())) + costs.experts_seconds(
            tokens / chunks, tokens / chunks * ranks, ranks
        )
        clock += shape.layers * chunks * max(fetch, compute)
        ends = np.sort(outputs)
        for done in np.unique(np.linspace(0, ends[-1], 16).astype(int))[1:]:
            context = each * (float(prompts.mean()) + done)
            layer = costs.attention_decode_seconds(each, context) + costs.experts_seconds(each, each * ranks, ranks)
            moved = fetch + costs.host.seconds(context * kv_layer)
            clock += shape.layers * max(moved, layer) * ends[-1] / 15
        finish[part] = clock
    return Baseline(
        "layer-wise offloading", clock, batch * ranks, finish, f"batch {batch} a rank, {resident} layers resident"
    )


def on_demand(costs: Costs, memory: Memory, ranks: int, workload: Workload) -> Baseline:
    """Experts fetched when tokens have chosen them, so that no copy is hidden; the rest and KV resident."""
    shape = costs.shape
    if memory.device is None:
        raise PlanError("on-demand fetching needs a device with a memory of its own")
    expert = shape.expert_parameters * shape.expert_bytes
    replicated = shape.replicated_bytes
    spare = memory.device - replicated - 2 * shape.experts_bytes / ranks - activation_bytes(shape, 256, 256)
    per_rank = spare * 0.5 / (workload.mean_context * shape.kv_token_bytes)
    batch = max(int(min(per_rank, len(workload) / ranks)), 1)
    cached = min(max(spare * 0.5, 0.0) * ranks / max(shape.moe_layers * shape.experts_bytes, 1.0), 1.0)

    def step(sequences: float) -> float:
        own = max(sequences / ranks, 1.0)
        chosen = 1 - (1 - shape.experts_per_token / max(shape.experts, 1)) ** sequences
        fetch = costs.host.seconds(chosen * shape.experts / ranks * expert * (1 - cached))
        layer = costs.attention_decode_seconds(own, own * workload.mean_context)
        return shape.layers * (layer + costs.experts_seconds(own, sequences, ranks) + fetch)

    tokens = 4096.0
    wave = costs.attention_prefill_seconds(tokens, float(workload.prompts.mean())) + costs.experts_seconds(
        tokens, tokens * ranks, ranks
    )
    wave += costs.host.seconds(shape.experts_bytes / ranks * (1 - cached))
    prefill = workload.prompt_tokens / ranks / tokens * shape.layers * wave
    steps, active, _ = running(workload.outputs, min(batch * ranks, len(workload)))
    sizes = np.geomspace(1.0, max(float(active.max()), 1.01), 12)
    ends = prefill + np.cumsum(np.interp(active, sizes, [step(size) for size in sizes]) * steps)
    finish = np.interp(np.arange(len(workload)), np.linspace(0, len(workload) - 1, len(ends)), ends)
    setting = f"batch {batch} a rank, {cached:.0%} cached"
    return Baseline("on-demand fetching", float(ends[-1]), batch * ranks, finish, setting)


def _resident_kv_tokens(
    costs: Costs, memory: Memory, ranks: int, most: int, chunk: int, tensor_parallel: bool
) -> float:
    """Tokens of KV that the instance has room for beside all parameters; below 0 where those do not fit."""
    shape = costs.shape
    device = memory.device if memory.device is not None else memory.host
    replicated = shape.replicated_bytes / (ranks if tensor_parallel else 1)
    parameters = replicated + shape.moe_layers * shape.experts_bytes / ranks
    rows = (most + chunk) // (1 if tensor_parallel else ranks)
    left = device - parameters - activation_bytes(shape, min(rows, 1024), min(rows, 16384))
    return left / shape.kv_token_bytes * _kv_shards(costs, ranks, tensor_parallel)


def _kv_shards(costs: Costs, ranks: int, tensor_parallel: bool) -> int:
    """Over how many ranks KV is spread: by tensor parallelism only where it has heads, which the latent has not."""
    return 1 if tensor_parallel and costs.shape.attention.is_latent else ranks


def _mixed_step(
    costs: Costs,
    ranks: int,
    batch: float,
    context: float,
    prefill: float,
    length: float,
    tensor_parallel: bool,
    engine: Engine,
    spread: float,
) -> float:
    """One step of all ranks: `batch` sequences decode over `context` tokens, `prefill` prompt tokens are mixed in."""
    if prefill and batch and not engine.mixes:
        alone = (tensor_parallel, engine, spread)
        return _mixed_step(costs, ranks, batch, context, 0.0, length, *alone) + _mixed_step(
            costs, ranks, 0.0, 0.0, prefill, length, *alone
        )
    shape = costs.shape
    tokens = batch + prefill
    if tensor_parallel:
        projection = work.projections(shape, tokens) * (1 / ranks)
        scores = work.decode_attention(shape, context, batch)
        shards = _kv_shards(costs, ranks, True)
        scores = work.Work(scores.flops / ranks, scores.bytes / shards)
        chunk = work.prefill_attention(shape, prefill, length) * (1 / ranks)
        link = costs.local if ranks <= costs.ranks_per_node else costs.remote
        exchange = 2 * link.seconds(2 * tokens * shape.hidden * work.ACTIVATION_BYTES)
    else:
        projection = work.projections(shape, tokens / ranks)
        longest = 1 + spread * _largest_of(ranks) / max(batch / ranks, 1.0) ** 0.5
        scores = work.decode_attention(shape, context / ranks * longest, batch / ranks)
        chunk = work.prefill_attention(shape, prefill / ranks, length)
        exchange = 2 * costs.exchange_seconds(tokens / ranks, ranks)
    attention = costs.linear.seconds(projection) + costs.decode_attention.seconds(scores)
    if prefill:
        attention += costs.prefill_attention.seconds(chunk)
    experts = costs.experts_seconds(tokens / ranks, tokens, ranks)
    dense = costs.dense_seconds(tokens / ranks)
    compute = shape.layers * (attention + costs.layer_fixed) + shape.moe_layers * experts + shape.dense_layers * dense
    exchanges = shape.layers * exchange
    shown = max(compute, exchanges) if engine.hides_exchange else compute + exchanges
    return shown + costs.head_seconds(batch / ranks) + costs.step_fixed


def _spread_of_contexts(workload: Workload) -> float:
    """Coefficient of variation of the contexts of decoding sequences, each met as often as it decodes."""
    steps = workload.outputs.astype(np.float64)
    middle = workload.prompts + steps / 2
    mean = float((middle * steps).sum() / steps.sum())
    square = float(((middle**2 + steps**2 / 12) * steps).sum() / steps.sum())
    return max(square / mean**2 - 1, 0.0) ** 0.5


def _largest_of(ranks: int) -> float:
    """Standard deviations by which the largest of so many normal values exceeds the mean, about (Blom, 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def _remembered(step: Callable[..., float]) -> Callable[..., float]:
    """The same for arguments that differ by less than about 3%."""
    known: dict[tuple[int, ...], float] = {}

    def nearly(*arguments: float) -> float:
        key = tuple(
            int(a) if a < 32 else int(a) >> (int(a).bit_length() - 5) << (int(a).bit_length() - 5) for a in arguments
        )
        if key not in known:
            known[key] = step(*arguments)
        return known[key]

    return nearly
