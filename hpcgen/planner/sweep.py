"""The graph of one sweep over the layers, in prefill and in decode, and how long a sweep takes.

Resources: the device computes, one link copies from the host and one to it, the network exchanges tokens. A ring of
`slots` buffers ties them: the parameters of a layer are fetched when the layer that used their buffer is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcgen.planner.configuration import PhaseConfiguration, layer_bytes
from hpcgen.planner.costs import Costs
from hpcgen.planner.graph import Graph, Schedule
from hpcgen.sequence import PAGE_TOKENS

COMPUTE, FETCH, WRITE, NETWORK = "compute", "host to device", "device to host", "network"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A scheduled sweep."""

    graph: Graph
    schedule: Schedule
    seconds: float
    """In steady state: the next sweep's first layers are fetched while this one ends."""

    def busy(self) -> dict[str, float]:
        """Seconds that each resource works."""
        total: dict[str, float] = {}
        for node in self.graph.nodes:
            total[node.resource] = total.get(node.resource, 0.0) + node.seconds
        return total

    def critical(self) -> dict[str, float]:
        """Seconds of the critical path by kind of work, the longest first."""
        total: dict[str, float] = {}
        for index in self.schedule.critical:
            node = self.graph.nodes[index]
            kind = node.name.split(" of ")[0]
            total[kind] = total.get(kind, 0.0) + node.seconds
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def limit(self) -> str:
        """The resource that bounds the sweep."""
        busy = self.busy()
        return max(busy, key=busy.__getitem__)


def prefill_sweep(costs: Costs, phase: PhaseConfiguration, tokens: int, length: float, rows: float = 0.0) -> Sweep:
    """One wave of `tokens` tokens on one rank, of prompts `length` long; `rows` of them end and need logits.

    Data-parallel: the rank computes all experts. KV is written to the host by microbatch; the device holds two
    layers of it.
    """
    shape = costs.shape
    sizes = _microbatches(tokens, phase.attention_batch)
    each = tokens / sizes
    attention = costs.attention_prefill_seconds(each, length) + costs.layer_fixed / 2
    experts = costs.experts_seconds(tokens, tokens, 1) + costs.layer_fixed / 2
    dense = costs.dense_seconds(tokens) + costs.layer_fixed / 2
    write = costs.layer_kv_seconds(costs.back, each, rows / sizes)
    graph = Graph()
    write_by = COMPUTE if costs.copies_compute else WRITE
    fetched = _Ring(graph, costs, phase, 1)
    done: list[int] = []
    written: list[int] = []
    for layer in range(shape.layers):
        ready = fetched.layer(layer, done)
        before = [ready, done[-1] if done else -1, written[layer - 2] if layer >= 2 else -1]
        parts = []
        for _ in range(sizes):
            parts.append(graph.add(f"attention of layer {layer}", COMPUTE, attention, before))
            if write:
                graph.add(f"KV write of layer {layer}", write_by, write, parts[-1:])
        written.append(len(graph.nodes) - 1 if write else -1)
        kind, seconds = ("dense MLP", dense) if layer < shape.dense_layers else ("experts", experts)
        done.append(graph.add(f"{kind} of layer {layer}", COMPUTE, seconds, parts))
    graph.add("head", COMPUTE, costs.head_seconds(rows) + costs.step_fixed, done[-1:])
    return _finish(graph, fetched)


def decode_sweep(
    costs: Costs, phase: PhaseConfiguration, ranks: int, sequences: float, context: float, all_sequences: float
) -> Sweep:
    """One step of the slowest rank: `sequences` sequences with `context` tokens of KV in all, of `all_sequences`.

    Attention is data-parallel and by microbatch; experts are spread over `ranks` and work on all tokens. Tokens are
    dispatched when the last microbatch is done, or each microbatch's while the next is computed (`overlaps_exchange`).
    """
    shape = costs.shape
    sizes = _microbatches(sequences, phase.attention_batch)
    attention = costs.attention_decode_seconds(sequences / sizes, context / sizes) + costs.layer_fixed / 2
    parts_sent = sizes if costs.overlaps_exchange else 1
    exchange = costs.exchange_seconds(sequences / parts_sent, ranks)
    experts = costs.experts_seconds(sequences, all_sequences, ranks) + costs.layer_fixed / 2
    dense = costs.dense_seconds(sequences) + costs.layer_fixed / 2
    write = restore = 0.0
    if phase.kv_streamed:  # by layer: a page is read and, with its new token, written as a whole
        write = costs.layer_kv_seconds(costs.back, sequences * PAGE_TOKENS, 0.0)
        restore = costs.layer_kv_seconds(costs.host, context, sequences)
    elif costs.streamed:  # pages that have filled
        write = costs.back.seconds(sequences * shape.attention.kv_elements * shape.kv_bytes)
    graph = Graph()
    fetch_by, write_by = (COMPUTE, COMPUTE) if costs.copies_compute else (FETCH, WRITE)
    fetched = _Ring(graph, costs, phase, ranks)
    done: list[int] = []
    for layer in range(shape.layers):
        ready = fetched.layer(layer, done)
        before = [ready, done[-1] if done else -1]
        if restore:
            after = [done[layer - 2]] if layer >= 2 else []
            before.append(graph.add(f"KV restore of layer {layer}", fetch_by, restore, after))
        moe = layer >= shape.dense_layers
        parts = []
        for _ in range(sizes):
            part = graph.add(f"attention of layer {layer}", COMPUTE, attention, before)
            if moe and exchange and costs.overlaps_exchange:
                part = graph.add(f"dispatch of layer {layer}", NETWORK, exchange, [part])
            parts.append(part)
        if write:
            graph.add(f"KV write of layer {layer}", write_by, write, parts)
        if moe and exchange and not costs.overlaps_exchange:
            parts = [graph.add(f"dispatch of layer {layer}", NETWORK, exchange, parts)]
        last = graph.add(
            f"{'experts' if moe else 'dense MLP'} of layer {layer}", COMPUTE, experts if moe else dense, parts
        )
        if moe and exchange:
            last = graph.add(f"combine of layer {layer}", NETWORK, exchange * parts_sent, [last])
        done.append(last)
    graph.add("head", COMPUTE, costs.head_seconds(sequences) + costs.step_fixed, done[-1:])
    return _finish(graph, fetched)


class _Ring:
    """Fetches of the layers that are not resident; the first to be needed are in the buffers when a sweep begins."""

    def __init__(self, graph: Graph, costs: Costs, phase: PhaseConfiguration, ranks: int):
        shape = costs.shape
        self._graph, self._slots = graph, phase.ring_slots
        streamed = shape.layers - phase.resident_layers if costs.streamed else 0
        self._streams = _spread(shape.layers, streamed)
        self._seconds = costs.host.seconds(layer_bytes(shape, ranks))
        self._fetched: list[int] = []
        self.resource = COMPUTE if costs.copies_compute else FETCH

    @property
    def ahead_seconds(self) -> float:
        """Seconds of the fetches that the sweep before has to do for this one."""
        return min(len(self._fetched), self._slots) * self._seconds

    def layer(self, layer: int, done: Sequence[int]) -> int:
        """Node after which the parameters of a layer are there; -1 when they are from the start."""
        if not self._streams[layer]:
            return -1
        count = len(self._fetched)
        slot_free = done[self._fetched[count - self._slots]] if count >= self._slots else -1
        self._fetched.append(layer)
        seconds = 0.0 if count < self._slots else self._seconds
        return self._graph.add(f"fetch of layer {layer}", self.resource, seconds, [slot_free])


def _spread(layers: int, streamed: int) -> list[bool]:
    """Which layers are streamed: evenly spaced, so that each fetch has resident layers to hide behind."""
    return [(layer + 1) * streamed // layers > layer * streamed // layers for layer in range(layers)]


def _microbatches(batch: float, size: int) -> int:
    return max(1, -(-int(batch) // max(size, 1)))


def _finish(graph: Graph, fetched: _Ring) -> Sweep:
    schedule = graph.schedule()
    sweep = Sweep(graph, schedule, schedule.seconds)
    busy = sweep.busy()
    busy[fetched.resource] = busy.get(fetched.resource, 0.0) + fetched.ahead_seconds
    return Sweep(graph, schedule, max(schedule.seconds, *busy.values()))
