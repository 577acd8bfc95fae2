"""Chooses the configuration of an instance: enumerates batch sizes, rings and residents under the memory limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpcgen.planner.completion import Estimate, estimate, seen_length
from hpcgen.planner.configuration import (
    Configuration,
    PhaseConfiguration,
    activation_bytes,
    device_bytes,
    embedding_bytes,
    layer_bytes,
)
from hpcgen.planner.costs import Costs
from hpcgen.planner.decisions import Source, cheapest_source, refill_share
from hpcgen.planner.errors import PlanError
from hpcgen.planner.hardware import Hardware
from hpcgen.planner.sweep import decode_sweep, prefill_sweep
from hpcgen.planner.workload import Workload
from hpcgen.sequence import PAGE_TOKENS, pages_for

DEVICE_SHARE = 0.92
"""Of a device's memory, what a plan may use; the rest is for the driver, the kernels and the network library."""
HOST_SHARE = 0.9
IN_PLACE_SHARE = 0.1
"""Of a node's memory, what one rank may compute in where it is all one memory."""
FINALISTS = 8
"""Decode candidates of the highest rate whose completion time is estimated."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a plan may use, in bytes: of one device (None: the host store is used in place), and of one node."""

    device: float | None
    host: float

    @classmethod
    def of(cls, hardware: Hardware) -> Memory:
        return cls(hardware.memory * DEVICE_SHARE, hardware.host_memory * HOST_SHARE)


@dataclass(frozen=True, slots=True)
class Given:
    """What the user decided, and the planner takes as it is."""

    attention_batch: int | None = None
    expert_batch: int | None = None
    partition_below: int | None = None
    longest: int | None = None
    """Tokens of the longest sequence that may come, where that is more than the workload says."""


FREE = Given()


@dataclass(frozen=True, slots=True)
class Choice:
    """The best configuration found, what it will do, and how many were looked at."""

    configuration: Configuration
    estimate: Estimate
    candidates: int


def choose(
    costs: Costs, ranks: int, ranks_per_node: int, memory: Memory, workload: Workload, given: Given = FREE
) -> Choice:
    """The configuration with the least batch completion time. Raises PlanError where none fits the memory."""
    shape = costs.shape
    host_pages = _host_pages(costs, memory)
    longest = max(int((workload.prompts + workload.most).max()) - 1, given.longest or 0)
    needed = pages_for(longest)
    if needed > host_pages:
        raise PlanError(
            f"{shape.name} with sequences of {longest:,} tokens needs {needed:,} KV pages in a host store, and "
            f"{memory.host / 1e9:,.1f} GB a node leave {host_pages:,}: give more host memory, or shorter sequences"
        )
    prefill, waves = _best_prefill(costs, ranks, memory, workload, needed, given)
    context = workload.mean_context
    decoders = list(_decode_candidates(costs, memory, ranks, len(workload) / ranks, context, needed, given))
    if not decoders:
        raise PlanError(_too_small(costs, memory, "decode", ranks))
    held = host_pages * 0.9 * -(-ranks // ranks_per_node) / ranks / (context / PAGE_TOKENS + 0.5)
    finalists: list[PhaseConfiguration] = []
    for load in (held, 1.0):  # the best with full batches, and the best when a batch has run nearly empty
        rates = [_decode_rate(costs, phase, ranks, context, load) for phase in decoders]
        ranked = sorted(zip(rates, range(len(decoders)), strict=True), key=lambda item: (-item[0], item[1]))
        finalists += [decoders[index] for _, index in ranked[:FINALISTS] if decoders[index] not in finalists]
    best: Choice | None = None
    for decode in finalists:
        configuration = Configuration(
            ranks=ranks,
            ranks_per_node=ranks_per_node,
            prefill=prefill,
            decode=decode,
            host_pages=host_pages,
            watermark=_watermark(workload, decode),
            partition_below=_partition_below(costs, decode, ranks, context)
            if given.partition_below is None
            else given.partition_below,
            migrate=cheapest_source(costs, max(int(context), 1), True, False) is Source.MIGRATE,
            in_place=memory.device is None,
        )
        found = estimate(costs, configuration, workload)
        if best is None or found.seconds < best.estimate.seconds:
            best = Choice(configuration, found, 0)
    assert best is not None
    share = refill_share(best.estimate.switch_seconds, best.estimate.step_seconds, float(workload.outputs.mean()))
    configuration = replace(best.configuration, refill_below=round(share, 3))
    return Choice(configuration, best.estimate, waves + len(decoders))


def fits(configuration: Configuration, costs: Costs, memory: Memory) -> bool:
    """Whether both phases are within the device's memory, and weights and KV within a node's."""
    shape = costs.shape
    host = shape.total_bytes + configuration.host_pages * PAGE_TOKENS * shape.kv_token_bytes
    if host > memory.host:
        return False
    if memory.device is None:
        return True
    phases = ((configuration.prefill, 1), (configuration.decode, configuration.ranks))
    return all(sum(device_bytes(shape, phase, ranks).values()) <= memory.device for phase, ranks in phases)


def _host_pages(costs: Costs, memory: Memory) -> int:
    shape = costs.shape
    left = memory.host - shape.total_bytes
    if left <= 0:
        raise PlanError(
            f"{shape.name} has {shape.total_bytes / 1e9:,.1f} GB of parameters, and a node may use "
            f"{memory.host / 1e9:,.1f} GB of host memory: use nodes with more, or a quantised checkpoint"
        )
    return int(left // (shape.kv_token_bytes * PAGE_TOKENS))


def _powers(low: int, high: float) -> list[int]:
    sizes = [low]
    while sizes[-1] * 2 <= high:
        sizes.append(sizes[-1] * 2)
    return sizes


def _rings(costs: Costs, left: float, ranks: int) -> Iterator[tuple[int, int]]:
    """(resident layers, ring slots) that fit `left` bytes: all resident, or the most beside 2 to 4 slots."""
    shape = costs.shape
    one = layer_bytes(shape, ranks)
    if one * shape.layers <= left:
        yield shape.layers, 0
        return
    for slots in (2, 3):
        resident = int(left // one) - slots
        if resident >= 0:
            yield min(resident, shape.layers - slots), slots


def _best_prefill(
    costs: Costs, ranks: int, memory: Memory, workload: Workload, longest_pages: int, given: Given
) -> tuple[PhaseConfiguration, int]:
    """The smallest wave that comes within 2% of the best rate, and the number of candidates."""
    length = seen_length(workload)
    candidates = list(_prefill_candidates(costs, memory, workload.prompt_tokens / ranks, longest_pages, given))
    if not candidates:
        raise PlanError(_too_small(costs, memory, "prefill", 1))
    rates = [_prefill_rate(costs, phase, length) for phase in candidates]
    good = [phase for phase, rate in zip(candidates, rates, strict=True) if rate >= 0.98 * max(rates)]
    return min(good, key=lambda phase: (phase.expert_batch, -phase.attention_batch)), len(candidates)


def _prefill_candidates(
    costs: Costs, memory: Memory, tokens_per_rank: float, longest_pages: int, given: Given
) -> Iterator[PhaseConfiguration]:
    shape = costs.shape
    most = max(min(tokens_per_rank * 2, 2**19), 2048)
    for wave in [given.expert_batch] if given.expert_batch else _powers(1024, most):
        sizes = _powers(max(512, wave // 16), min(wave, 16384)) if wave <= 2**18 else [16384]
        for microbatch in [min(given.attention_batch, wave)] if given.attention_batch else sizes:
            if memory.device is None:
                if activation_bytes(shape, microbatch, wave) > IN_PLACE_SHARE * memory.host and microbatch > 512:
                    continue
                yield PhaseConfiguration(microbatch, wave, shape.layers, 0)
                continue
            pages = max(longest_pages, 2 * pages_for(microbatch))
            kv = 2 * pages * PAGE_TOKENS * shape.attention.kv_elements * shape.kv_bytes
            left = memory.device - kv - activation_bytes(shape, microbatch, wave) - embedding_bytes(shape)
            for resident, slots in _rings(costs, left, 1):
                yield PhaseConfiguration(microbatch, wave, resident, slots, kv)


def _decode_candidates(
    costs: Costs,
    memory: Memory,
    ranks: int,
    sequences_per_rank: float,
    context: float,
    longest_pages: int,
    given: Given,
) -> Iterator[PhaseConfiguration]:
    """Batches; for each, KV as the batch wants it beside what parameters that leaves, the reverse, and KV streamed."""
    shape = costs.shape
    page = shape.kv_token_bytes * PAGE_TOKENS
    pages_each = context / PAGE_TOKENS + 1.5
    one = layer_bytes(shape, ranks)
    batches = _powers(8, max(min(sequences_per_rank * 2, 16384), 8))
    for batch in [given.expert_batch] if given.expert_batch else batches:
        sizes = sorted({max(batch // parts, 1) for parts in (1, 2, 4)})
        for microbatch in [min(given.attention_batch, batch)] if given.attention_batch else sizes:
            if memory.device is None:
                if activation_bytes(shape, microbatch, batch) > IN_PLACE_SHARE * memory.host and microbatch > 8:
                    continue
                yield PhaseConfiguration(microbatch, batch, shape.layers, 0)
                continue
            free = memory.device - activation_bytes(shape, microbatch, batch) - embedding_bytes(shape)
            wanted = max(batch * pages_each, longest_pages) // 1 * page
            least = longest_pages * page
            for resident, slots in _rings(costs, free - wanted, ranks):
                kv = (free - (resident + slots) * one) // page * page
                yield PhaseConfiguration(microbatch, batch, resident, slots, min(kv, wanted))
            for resident, slots in _rings(costs, free - least, ranks):
                kv = (free - (resident + slots) * one) // page * page
                yield PhaseConfiguration(microbatch, batch, resident, slots, min(kv, wanted))
            streamed = 2 * pages_each * PAGE_TOKENS * shape.attention.kv_elements * shape.kv_bytes * microbatch
            for resident, slots in _rings(costs, free - streamed, ranks):
                yield PhaseConfiguration(microbatch, batch, resident, slots, streamed, kv_streamed=True)


def _prefill_rate(costs: Costs, phase: PhaseConfiguration, length: float) -> float:
    rows = phase.expert_batch / max(length, 1)
    return phase.expert_batch / prefill_sweep(costs, phase, phase.expert_batch, length, rows).seconds


def _decode_rate(costs: Costs, phase: PhaseConfiguration, ranks: int, context: float, held: float) -> float:
    batch = min(float(phase.expert_batch), held)
    if phase.kv_bytes and not phase.kv_streamed:
        page = costs.shape.kv_token_bytes * PAGE_TOKENS
        batch = max(min(batch, phase.kv_bytes / page / (context / PAGE_TOKENS + 1.5)), 1.0)
    return batch / decode_sweep(costs, phase, ranks, batch, batch * context, batch * ranks).seconds


def _watermark(workload: Workload, decode: PhaseConfiguration) -> float:
    """Room that the active sequences still grow into is kept free: half of the mean output, within bounds."""
    share = float(workload.outputs.mean()) / 2 / max(workload.mean_context + float(workload.outputs.mean()) / 2, 1.0)
    return round(min(max(1 - share, 0.6), 0.95), 3)


def _partition_below(costs: Costs, decode: PhaseConfiguration, ranks: int, context: float) -> int:
    """As many stragglers as ranks, where the very last one is done sooner by all ranks than by one."""
    if ranks < 2:
        return 0
    alone = decode_sweep(costs, decode, ranks, 1.0, context, 1.0).seconds
    return ranks if costs.split_step_seconds(context, ranks) < alone else 0


def _too_small(costs: Costs, memory: Memory, phase: str, ranks: int) -> str:
    shape = costs.shape
    ring = 2 * layer_bytes(shape, ranks) + embedding_bytes(shape)
    return (
        f"{shape.name} does not fit: {phase} needs {ring / 1e9:,.1f} GB on a device for embedding, head and a ring of "
        f"two layers, and room to compute, and may use {(memory.device or 0) / 1e9:,.1f} GB: use larger devices"
        + (", or more of them" if ranks > 1 else "")
    )
