"""Why a configuration is what it is: a table for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hpcgen.planner import work
from hpcgen.planner.completion import estimate, seen_length
from hpcgen.planner.configuration import PhaseConfiguration, device_bytes
from hpcgen.planner.costs import Costs
from hpcgen.planner.errors import PlanError
from hpcgen.planner.search import Choice, Memory, choose
from hpcgen.planner.sweep import COMPUTE, Sweep, decode_sweep, prefill_sweep
from hpcgen.planner.workload import Workload
from hpcgen.sequence import PAGE_TOKENS


def report(costs: Costs, choice: Choice, memory: Memory, workload: Workload) -> str:
    """Everything `hpcgen plan` prints about a choice."""
    shape, configuration, found = costs.shape, choice.configuration, choice.estimate
    lines = [
        f"{shape.name}: {shape.parameters / 1e9:,.2f} G parameters ({shape.active_parameters / 1e9:,.2f} G a token), "
        f"{shape.total_bytes / 1e9:,.1f} GB, {shape.kv_token_bytes / 1e3:,.1f} kB of KV a token",
        f"{configuration.ranks} ranks on {configuration.nodes} nodes; {len(workload):,} sequences, "
        f"{workload.prompt_tokens:,} prompt and {workload.output_tokens:,} output tokens",
        "",
        f"completion     {clock(found.seconds)}: prefill {clock(found.prefill_seconds)}, "
        f"full batches {clock(found.decode_seconds)}, tail {clock(found.tail_seconds)}",
        f"tokens/s       prefill {found.prefill_rate:,.0f}, decode {found.decode_rate:,.0f}",
        f"B_attn         prefill {configuration.prefill.attention_batch:,} tokens, "
        f"decode {configuration.decode.attention_batch:,} sequences",
        f"B_moe          prefill {configuration.prefill.expert_batch:,} tokens, "
        f"decode {configuration.decode.expert_batch:,} sequences ({found.active:,.0f} fit on the mean)",
        f"layers         prefill {_layers(configuration.prefill, shape.layers)}; "
        f"decode {_layers(configuration.decode, shape.layers)}"
        + ("; KV streamed" if configuration.decode.kv_streamed else ""),
        f"host store     {configuration.host_pages:,} pages a node "
        f"({configuration.host_pages * PAGE_TOKENS * shape.kv_token_bytes / 1e9:,.1f} GB), "
        f"watermark {configuration.watermark:.0%}, refill below {configuration.refill_below:.0%} of a full batch",
        f"candidates     {choice.candidates}",
        "",
    ]
    if memory.device is None:
        lines.append("memory         the host store is used in place")
    else:
        for name, phase, ranks in (
            ("prefill", configuration.prefill, 1),
            ("decode", configuration.decode, configuration.ranks),
        ):
            parts = device_bytes(shape, phase, ranks)
            uses = ", ".join(f"{use} {size / 1e9:,.1f}" for use, size in parts.items() if size >= 5e7)
            total = sum(parts.values())
            lines.append(f"device, {name:<7} {total / 1e9:,.1f} of {memory.device / 1e9:,.1f} GB: {uses or 'little'}")
    lines.append("")
    for name, sweep in sweeps(costs, choice, workload).items():
        limit = sweep.limit()
        if limit == COMPUTE:
            limit += f" ({memory_bound(costs, choice, workload, name):.0%} of it waits for device memory)"
        lines.append(f"{name:<8} {sweep.seconds * 1e3:,.2f} ms a sweep, limited by {limit}; {_shares(sweep)}")
    lines += ["", *gains(costs, choice, memory, workload)]
    return "\n".join(lines)


def sweeps(costs: Costs, choice: Choice, workload: Workload) -> dict[str, Sweep]:
    """The sweeps with full batches, by phase."""
    configuration, found = choice.configuration, choice.estimate
    tokens = int(max(min(configuration.prefill.expert_batch, workload.prompt_tokens / configuration.ranks), 1))
    length = seen_length(workload)
    batch = found.active
    return {
        "prefill": prefill_sweep(costs, configuration.prefill, tokens, length, tokens / max(length, 1)),
        "decode": decode_sweep(
            costs,
            configuration.decode,
            configuration.ranks,
            batch,
            batch * workload.mean_context,
            batch * configuration.ranks,
        ),
    }


def memory_bound(costs: Costs, choice: Choice, workload: Workload, phase: str) -> float:
    """Share of the time in kernels of a layer that reading memory takes, not arithmetic."""
    shape, ranks = costs.shape, choice.configuration.ranks
    if phase == "prefill":
        tokens = float(choice.configuration.prefill.expert_batch)
        attention = work.prefill_attention(shape, tokens, seen_length(workload))
        experts = work.routed_experts(shape, tokens)
    else:
        tokens = choice.estimate.active
        attention = work.decode_attention(shape, tokens * workload.mean_context, tokens)
        experts = work.routed_experts(shape, tokens * ranks, ranks)
    roof = costs.prefill_attention if phase == "prefill" else costs.decode_attention
    parts = [(costs.linear, work.projections(shape, tokens)), (roof, attention)]
    parts.append((costs.experts, experts) if shape.experts else (costs.linear, work.dense_mlp(shape, tokens)))
    waiting = sum(roof.seconds(part) for roof, part in parts if roof.waits_for_memory(part))
    return waiting / sum(roof.seconds(part) for roof, part in parts)


def gains(costs: Costs, choice: Choice, memory: Memory, workload: Workload) -> Iterable[str]:
    """What more of something would bring, each tried by itself."""
    configuration = choice.configuration
    ranks, per_node = configuration.ranks, configuration.ranks_per_node
    more = per_node if ranks % per_node == 0 else 1
    tries = [(f"{ranks + more} ranks", ranks + more, memory)]
    if memory.device is not None:
        tries.append(("10% more device memory", ranks, replace(memory, device=memory.device * 1.1)))
    tries.append(("10% more host memory", ranks, replace(memory, host=memory.host * 1.1)))
    for name, count, room in tries:
        try:
            better = choose(costs, count, per_node, room, workload).estimate.seconds
        except PlanError:
            continue
        yield f"with {name:<24} {clock(better)} ({choice.estimate.seconds / better - 1:+.1%} throughput)"
    faster = replace(costs, host=replace(costs.host, bandwidth=2 * costs.host.bandwidth))
    if costs.streamed:
        better = estimate(faster, configuration, workload).seconds
        gain = choice.estimate.seconds / better - 1
        yield f"with {'twice the host link':<24} {clock(better)} ({gain:+.1%} throughput)"


def clock(seconds: float) -> str:
    """'1 h 02 min', '3 min 20 s', '12.3 s'."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{seconds:.3g} s"


def _layers(phase: PhaseConfiguration, layers: int) -> str:
    if phase.ring_slots == 0:
        return f"all {layers} resident"
    return f"{phase.resident_layers} of {layers} resident, ring of {phase.ring_slots}"


def _shares(sweep: Sweep) -> str:
    total = sum(sweep.critical().values()) or 1.0
    return "critical path: " + ", ".join(
        f"{kind} {seconds / total:.0%}" for kind, seconds in sweep.critical().items() if seconds / total >= 0.01
    )
